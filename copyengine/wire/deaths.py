"""How processes died, counted: how long to wait before the next start, and when starting makes no sense. Pure."""

import signal

MOST_DEATHS = 5
"""Deaths in a row with which a run is given up: what the same cause has killed so often it kills again, and who started
the run should hear of it. Fewer would end a run for a driver that needs a second restart."""

QUIET_S = 60.0
"""Seconds for which all must have served for the next death to be the first of a row."""

FIRST_PAUSE_S = 1.0
"""Seconds between the second death of a row and the start that follows; each death doubles them. None after the first:
most causes are gone with the dead process. What is not, memory that others hold or a device that recovers, is given
1 + 2 + 4 s in a row of five."""

MOST_PAUSE_S = 16.0
"""Seconds of the longest pause: so long at most the run goes without a process whose cause of death is gone."""


class DeathCount:
    """Counts deaths in a row. Times are seconds on one clock that never goes back."""

    def __init__(self, most: int | None = MOST_DEATHS, quiet_s: float = QUIET_S) -> None:
        """`most` None: they are never too many."""
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
        return self._most is not None and self.in_a_row >= self._most

    @property
    def pause_s(self) -> float:
        """Seconds to wait before what has died is started anew."""
        if self.in_a_row < 2:
            return 0.0
        doubled = min(self.in_a_row - 2, 16)  # 2.0 ** 1024 is an error
        return float(min(FIRST_PAUSE_S * 2**doubled, MOST_PAUSE_S))

    @property
    def ordinal(self) -> str:
        """Which death of how many this is, and the pause behind it."""
        parts = [f"death {self.in_a_row} in a row"]
        if self._most is not None:
            parts.append(f"{self._most} give up")
        if self.pause_s:
            parts.append(f"after a pause of {self.pause_s:g} s")
        return "; ".join(parts)

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
