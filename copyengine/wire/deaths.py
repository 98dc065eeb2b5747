"""How processes died, counted: after how many deaths in a row it makes no sense to start them anew. Pure."""

import signal

MOST_DEATHS = 5
"""Deaths in a row with which a run is given up."""

QUIET_S = 60.0
"""Seconds for which all must have served for the next death to be the first of a row."""


class DeathCount:
    """Counts deaths in a row. Times are seconds on one clock that never goes back."""

    def __init__(self, most: int = MOST_DEATHS, quiet_s: float = QUIET_S) -> None:
        self.in_a_row = 0
        self.first_cause = ""  # of this row
        self._most = most
        self._quiet_s = quiet_s
        self._served_s: float | None = None

    def died(self, cause: str, now_s: float) -> None:
        """A process died of `cause`."""
        if self._served_s is not None and now_s - self._served_s >= self._quiet_s:
            self.in_a_row = 0
        self._served_s = None
        if self.in_a_row == 0:
            self.first_cause = cause
        self.in_a_row += 1

    def served(self, now_s: float) -> None:
        """All serve from now on."""
        self._served_s = now_s

    @property
    def too_many(self) -> bool:
        """Whether the run is to be given up."""
        return self.in_a_row >= self._most

    @property
    def ordinal(self) -> str:
        """Which death of how many this is."""
        return f"death {self.in_a_row} in a row; {self._most} give up"

    @property
    def summary(self) -> str:
        """Why it is given up."""
        return f"given up after {self.in_a_row} deaths in a row; the first: {self.first_cause}"


def how_it_ended(code: int) -> str:
    """What an exit code says, in words; a negative one is a signal's number."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
