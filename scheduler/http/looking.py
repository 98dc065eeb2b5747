"""One look at the engine: what it says of itself now, as far as it says anything."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from msgspec import Struct

from copyengine.wire.errors import SlotstreamError
from scheduler.client import Client
from scheduler.protocol import ActivityReply, HealthReply, StatsReply

LOOK_S = 2.0
"""Seconds that the engine has to answer: who looks asks again soon, and Prometheus waits for 10 s by default."""

T = TypeVar("T")


class Look(Struct, frozen=True):
    """None of what the engine did not say in time."""

    health: HealthReply | None = None
    stats: StatsReply | None = None
    activity: ActivityReply | None = None


async def look(client: Client, with_activity: bool = False, deadline_s: float = LOOK_S) -> Look:
    """Ask for everything at once."""
    health, stats, activity = await asyncio.gather(
        _in_time(client.health(), deadline_s),
        _in_time(client.stats(), deadline_s),
        _in_time(client.activity() if with_activity else _nothing(), deadline_s),
    )
    return Look(health, stats, activity)


async def _in_time(reply: Awaitable[T], deadline_s: float) -> T | None:
    try:
        async with asyncio.timeout(deadline_s):
            return await reply
    except (SlotstreamError, TimeoutError):
        return None


async def _nothing() -> None:
    return None
