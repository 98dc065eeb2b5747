"""Work that would hold up the event loop, in threads of its own and within a time."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from copyengine.wire.errors import RequestRefused

T = TypeVar("T")

KEEPALIVE_S = 5.0
"""Seconds between two looks at whether who waits for a work is still there, and between two words to a client whose
request waits: several of them fit into the client's SILENCE_S."""


class TimedThreads:
    """Runs `count` works at a time, each for a stated time at most; others wait.

    A thread cannot be ended. One that is stuck in its work stays so: once all are, every further work is refused when
    its time is over. The end of the process waits for them, until whoever started it kills it.
    """

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)

    async def run(
        self,
        work: Callable[[], T],
        limit_s: float,
        late: Callable[[bool], RequestRefused],
        still_waits: Callable[[], None],
    ) -> T:
        """What `work()` returns or raises. `still_waits` is called every KEEPALIVE_S; an error of it ends the wait.

        Raises `late(begun)` after `limit_s` seconds, the wait for a thread included; `begun` says whether it got one.
        """
        begun = threading.Event()

        def in_thread() -> T:
            begun.set()
            return work()

        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._threads, in_thread)
        due_s = loop.time() + limit_s
        try:
            while not working.done():
                left_s = due_s - loop.time()
                if left_s <= 0:
                    raise late(begun.is_set())
                await asyncio.wait({working}, timeout=min(KEEPALIVE_S, left_s))
                if not working.done():
                    still_waits()
            return working.result()
        finally:
            working.cancel()  # if it waits for a thread it never gets one; what a thread still yields is nobody's

    def close(self) -> None:
        """Works that wait for a thread get none any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
