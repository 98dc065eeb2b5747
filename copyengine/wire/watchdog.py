"""Who serves and answers nothing any more: a process that is stopped, or whose event loop hangs. Pure, but for a clock.

Each process that serves is asked whether it is alive, ASK_S after its last answer, and has `patience_s` for the next
one. Only one question is out at a time: no pipe fills while a process, or the one that asks, is stopped.
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

ASK_S = 2.0
"""Seconds between an answer and the next question. Asking five idle processes every second takes 0.2 % of a core, and
nobody needs to know of a hang sooner than the watchdog's patience, in which this is little."""

LATE_S = 2.0
"""Seconds between two readings of OwnTime that count at most: eight times those between two turns of the supervisor.
Who comes later was stopped, or the machine slept, and so may those have that did not answer meanwhile."""


class Look(NamedTuple):
    """What a look at the time came to."""

    ask: list[str]
    """Who is to be asked now."""
    silent: list[str]
    """Who has not answered for too long, each said once."""


class Watchdog:
    """Times are seconds on one clock that never goes back. `patience_s` 0: nobody is ever asked."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._ask_s: dict[str, float] = {}  # when who has answered is asked again
        self._asked_s: dict[str, float] = {}  # when who has not answered was asked
        self._given_up: set[str] = set()

    def heard(self, name: str, now_s: float) -> None:
        """`name` has answered."""
        if self._asked_s.pop(name, None) is not None:
            self._ask_s[name] = now_s + ASK_S

    def look(self, serving: Iterable[str], now_s: float) -> Look:
        """It is `now_s`, and these serve. Who does not is forgotten: another process may come by that name."""
        names = list(serving) if self.patience_s else []
        self._forget_all_but(names)
        silent = [name for name in names if name in self._asked_s and now_s - self._asked_s[name] >= self.patience_s]
        for name in silent:
            del self._asked_s[name]
        self._given_up.update(silent)
        waiting = self._asked_s.keys() | self._given_up
        ask = [name for name in names if name not in waiting and now_s >= self._ask_s.get(name, now_s)]
        for name in ask:
            self._asked_s[name] = now_s
        return Look(ask, silent)

    def _forget_all_but(self, names: list[str]) -> None:
        self._ask_s = {name: at for name, at in self._ask_s.items() if name in names}
        self._asked_s = {name: at for name, at in self._asked_s.items() if name in names}
        self._given_up.intersection_update(names)


class OwnTime:
    """Seconds for which this process itself ran: of the time between two calls no more than LATE_S counts.

    What is waited for is so given its full time by one that is stopped for a while, or sleeps with the whole machine.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._read_s = now_s()
        self._own_s = 0.0

    def __call__(self) -> float:
        """Seconds since it was made."""
        now_s = self._now_s()
        self._own_s += min(now_s - self._read_s, LATE_S)
        self._read_s = now_s
        return self._own_s
