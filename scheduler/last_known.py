"""What somebody said last who may be too busy to answer now."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from copyengine.wire.errors import SlotstreamError

FRESH_S = 0.5
"""Seconds for which an answer is good enough: however many want to know, nobody is asked more often."""

T = TypeVar("T")


class LastKnown(Generic[T]):
    """The newest answer to one question. It is never put a second time while an answer to it is due."""

    def __init__(self, question: Callable[[], Awaitable[T]]) -> None:
        """`question` has a deadline of its own; that it raises a SlotstreamError leaves things as they were."""
        self.answer: T | None = None
        self._question = question
        self._answered_s = self._put_s = float("-inf")  # on the monotonic clock
        self._asking: asyncio.Task[None] | None = None

    def age_s(self, now_s: float) -> float:
        """Seconds since `answer` came."""
        return now_s - self._answered_s

    def ask(self, now_s: float) -> asyncio.Task[None] | None:
        """What is over with the answer that is due; None if the last one will do."""
        if self._asking is None and now_s - self._put_s >= FRESH_S:
            self._put_s = now_s
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> None:
        try:
            with contextlib.suppress(SlotstreamError):
                self.answer = await self._question()
                self._answered_s = time.monotonic()
        finally:
            self._asking = None
