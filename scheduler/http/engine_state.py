"""What the engine says of itself: whether it takes requests, and how long one may be."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from copyengine.wire.errors import PeerError, PeerTimeout
from scheduler.http.errors import engine_unavailable
from scheduler.protocol import HealthReply

HEALTH_S = 1.0
"""Seconds within which the scheduler says how it is to who asks whether it is ready."""

SERVING_S = 5.0
"""The same for requests, which can wait better than be refused while it is busy for a moment. One that says nothing for
so long takes no requests either."""

FRESH_S = 1.0
"""Seconds for which that it takes requests is not asked again. If it is wrong the engine refuses the request itself."""


class EngineState:
    """Asks `health`, which is the client's, and remembers a good answer for FRESH_S.

    `known_max_model_len`, `known_vocab_size` and `known_places` are what it last said of these; 0 until it does.
    """

    def __init__(self, health: Callable[[float], Awaitable[HealthReply]], now_s: Callable[[], float] = time.monotonic):
        self._health = health
        self._now_s = now_s
        self._fresh: HealthReply | None = None
        self._asked_s = 0.0
        self._asking: asyncio.Task[HealthReply] | None = None
        self.known_max_model_len = 0
        self.known_vocab_size = 0
        self.known_places = 0

    async def ask(self, deadline_s: float | None = None) -> HealthReply:
        """As it is now. PeerError if nothing is heard within `deadline_s`, or HEALTH_S.

        Whoever asks while an answer is due waits for that one.
        """
        deadline_s = HEALTH_S if deadline_s is None else deadline_s
        asking = self._asking
        if asking is None:
            asking = self._asking = asyncio.create_task(self._ask())
            asking.add_done_callback(self._asked)
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(asking)
        except TimeoutError:
            raise PeerTimeout(f"the engine does not answer within {deadline_s:g} s") from None

    def _asked(self, asking: asyncio.Task[HealthReply]) -> None:
        self._asking = None
        if not asking.cancelled():
            asking.exception()  # raised to who waits, if anybody does

    async def _ask(self) -> HealthReply:
        asked_s = self._now_s()
        try:
            async with asyncio.timeout(SERVING_S):  # the client's deadline begins anew when the question is sent
                reply = await self._health(SERVING_S)
        except TimeoutError:
            raise PeerTimeout(f"the engine does not answer within {SERVING_S:g} s") from None
        self.known_max_model_len = reply.max_model_len or self.known_max_model_len
        self.known_vocab_size = reply.vocab_size or self.known_vocab_size
        self.known_places = reply.places
        self._fresh, self._asked_s = reply if reply.ready else None, asked_s
        return reply

    async def serving(self) -> HealthReply:
        """What it says, at most FRESH_S ago, if it takes requests. ApiError 503 if it takes none."""
        if self._fresh is not None and self._now_s() - self._asked_s < FRESH_S:
            return self._fresh
        try:
            reply = await self.ask(SERVING_S)
        except PeerError:
            raise engine_unavailable(None) from None
        if not reply.ready:
            raise engine_unavailable(reply)
        return reply

    async def places(self) -> int:
        """Answers that may run or wait at a time; 0 if that is not known: no worker lives, or nobody answers."""
        if not self.known_places:
            with contextlib.suppress(PeerError):
                await self.ask()
        return self.known_places

    async def max_model_len(self) -> int:
        """Tokens of prompt and answer that one request may have; 0 if that was never said: the model still loads."""
        if not self.known_max_model_len:
            try:
                await self.ask()
            except PeerError:
                return 0
        return self.known_max_model_len
