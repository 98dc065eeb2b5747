"""Texts become tokens in threads of their own: a long prompt must not delay the others' tokens."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from copyengine.wire.errors import RequestRefused
from scheduler.ticket import KEEPALIVE_S

T = TypeVar("T")

ENCODE_S = 60.0
"""Seconds that a text may take to become tokens, its wait for a thread included; 4 MB of it that became 1.2 M tokens
took 3.9 (2 busy cores of an AMD EPYC, 2026-11)."""

ENCODE_THREADS = 8
"""Texts that are encoded at a time; others wait."""


class Encoder:
    """Runs what encodes texts, each for ENCODE_S at most.

    A thread cannot be ended. One that is stuck in a text stays so, ENCODE_THREADS of them at most: once all are, every
    further text is refused after ENCODE_S, while token ids are served as before. The end of the process waits for them,
    until whoever started it kills it.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(ENCODE_THREADS, "encode")

    async def run(self, encode: Callable[[], T], still_waits: Callable[[], None]) -> T:
        """What `encode()` returns or raises. `still_waits` is called every KEEPALIVE_S; an error of it ends the wait.

        RequestRefused("encode_timeout") after ENCODE_S.
        """
        begun = threading.Event()

        def work() -> T:
            begun.set()
            return encode()

        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._threads, work)
        due_s = loop.time() + ENCODE_S
        try:
            while not working.done():
                left_s = due_s - loop.time()
                if left_s <= 0:
                    raise RequestRefused("encode_timeout", _late(begun.is_set()))
                await asyncio.wait({working}, timeout=min(KEEPALIVE_S, left_s))
                if not working.done():
                    still_waits()
            return working.result()
        finally:
            working.cancel()  # if it waits for a thread it never gets one; what a thread still yields is nobody's

    def close(self) -> None:
        """Texts that wait for a thread get none any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _late(begun: bool) -> str:
    why = "the tokenizer is still at it" if begun else f"other texts held all {ENCODE_THREADS} threads"
    return f"the text was no tokens after {ENCODE_S:g} s: {why}; send a shorter one, or token_ids"
