"""What processes that share memory need: order of memory accesses, and waiting that leaves the core to others."""

import os
import threading
import time

MIN_NAP_S = 50e-6
"""The shortest sleep: the system makes 105 µs of it, and of a shorter one no less."""

MAX_NAP_S = 5e-3
"""The longest sleep, and so what a poll is late at most: less than a hundredth of what it has waited by then."""

YIELD_S = 100e-6
"""A wait shorter than this only yields the core; a nap of 50 µs takes about 105 µs on Linux."""


class Fence:
    """Calling it keeps every memory access before it before every one after it, also on weakly ordered CPUs.

    Python has no fence. Releasing a lock orders what came before it, taking it orders what comes after it, and a
    release followed by an acquire of the same lock is not reordered. So the lock is held between the calls.
    One Fence per thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


def yield_core() -> None:
    """Let other threads of this process, and others on this core, run if they want to.

    Not by time.sleep(0), which takes 85 µs (Linux 6.18, CPython 3.11, 2026-11), where this takes 0.8 µs.
    """
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def nap(waited_s: float) -> None:
    """Pause inside a polling loop that has waited for `waited_s` so far.

    Naps are 1 % of the time already waited, so that polling lengthens no wait by more, and a long one costs little.
    """
    if waited_s < YIELD_S:
        yield_core()
    else:
        time.sleep(min(max(waited_s / 100, MIN_NAP_S), MAX_NAP_S))
