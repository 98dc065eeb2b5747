"""How long anything was under way. One thread."""

import time
from collections.abc import Callable


class BusyClock:
    """Microseconds in which at least one thing was under way: where several were, the time counts once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._underway: set[int] = set()
        self._since_s = 0.0
        self._busy_s = 0.0

    def begin(self, number: int) -> None:
        """`number` is under way from now on."""
        if not self._underway:
            self._since_s = self._clock()
        self._underway.add(number)

    def end(self, number: int) -> int | None:
        """`number` is over; all microseconds so far if nothing else is under way, else None. None if it was not."""
        if number not in self._underway:
            return None
        self._underway.discard(number)
        if self._underway:
            return None
        self._busy_s += self._clock() - self._since_s
        return int(self._busy_s * 1e6)
