"""Whether the process lives, and whether a request would be accepted."""

from typing import Literal

from msgspec import Struct
from starlette.responses import Response

from copyengine.wire.errors import SlotstreamError
from scheduler.http.errors import RETRY_START_S
from scheduler.http.front import Call, Front, Route
from scheduler.http.models import json_response

HEALTH_S = 1.0
"""Seconds within which the scheduler says how it is."""


class LiveReply(Struct, frozen=True):
    """The process answers."""

    status: Literal["live"] = "live"


class ReadyReply(Struct, frozen=True):
    """`phase` is "ready", or why no request would be accepted: the engine's own word, or "unreachable"."""

    ready: bool
    phase: str
    model: str


async def live(front: Front, call: Call[None]) -> Response:
    """200 as long as the process lives."""
    return json_response(LiveReply())


async def ready(front: Front, call: Call[None]) -> Response:
    """200 if a request would be accepted, else 503."""
    reply = await _state(front)
    if reply.ready:
        return json_response(reply)
    return json_response(reply, 503, {"retry-after": str(RETRY_START_S)})


async def _state(front: Front) -> ReadyReply:
    if front.draining:
        return ReadyReply(False, "draining", front.model)
    try:
        health = await front.client.health(HEALTH_S)
    except SlotstreamError:
        return ReadyReply(False, "unreachable", front.model)
    return ReadyReply(health.ready, health.phase, front.model)


ROUTES = [
    Route("GET", "/health/live", live, "Whether the process lives", reply=LiveReply, guarded=False, serves=False),
    Route("GET", "/health/ready", ready, "Whether it serves", reply=ReadyReply, guarded=False, serves=False),
    Route("GET", "/health", ready, "The same", reply=ReadyReply, guarded=False, serves=False),
]
