"""Texts become tokens in threads of their own: a long prompt must not delay the others' tokens."""

from collections.abc import Callable
from typing import TypeVar

from copyengine.wire.errors import RequestRefused
from scheduler.timed_threads import TimedThreads

T = TypeVar("T")

ENCODE_S = 60.0
"""Seconds that a text may take to become tokens, its wait for a thread included; 4 MB of it that became 1.2 M tokens
took 3.9 (2 busy cores of an AMD EPYC, 2026-11)."""

ENCODE_THREADS = 8
"""Texts that are encoded at a time; others wait. More than cores, for a stuck one keeps its thread for good."""


class Encoder:
    """Runs what encodes texts, each for ENCODE_S at most.

    Once ENCODE_THREADS are stuck in theirs, further texts are refused after ENCODE_S; token ids are served as before.
    """

    def __init__(self) -> None:
        self._threads = TimedThreads(ENCODE_THREADS, "encode")

    async def run(self, encode: Callable[[], T], still_waits: Callable[[], None]) -> T:
        """What `encode()` returns or raises. `still_waits` is called every KEEPALIVE_S; an error of it ends the wait.

        RequestRefused("encode_timeout") after ENCODE_S.
        """
        return await self._threads.run(encode, ENCODE_S, _late, still_waits)

    def close(self) -> None:
        """Texts that wait for a thread get none any more."""
        self._threads.close()


def _late(begun: bool) -> RequestRefused:
    why = "the tokenizer is still at it" if begun else f"other texts held all {ENCODE_THREADS} threads"
    return RequestRefused(
        "encode_timeout", f"the text was no tokens after {ENCODE_S:g} s: {why}; send a shorter one, or token_ids"
    )
