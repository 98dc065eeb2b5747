"""Whether the process lives, and whether a request would be accepted."""

from typing import Literal

from msgspec import Struct
from starlette.responses import Response

from copyengine.wire.errors import PeerError
from scheduler.http.engine_state import HEALTH_S
from scheduler.http.errors import RETRY_START_S, without_paths
from scheduler.http.front import Call, Front, Route
from scheduler.http.models import json_response


class LiveReply(Struct, frozen=True):
    """The process answers."""

    status: Literal["live"] = "live"


class ReadyReply(Struct, frozen=True):
    """`phase` is "ready", or why no request would be accepted: the engine's own word, or "unreachable".

    `loading` names what is being read or allocated, of which `done_nbytes` of `total_nbytes` are through. `detail` says
    more.
    """

    ready: bool
    phase: str
    model: str
    loading: str = ""
    done_nbytes: int = 0
    total_nbytes: int = 0
    detail: str = ""


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
        return ReadyReply(False, "draining", front.model, detail="what runs is finished, nothing new is taken")
    try:
        health = await front.engine.ask()
    except PeerError:
        return ReadyReply(False, "unreachable", front.model, detail=f"no answer within {HEALTH_S:g} s")
    return ReadyReply(
        health.ready,
        health.phase,
        front.model,
        health.loading,
        health.done_nbytes,
        health.total_nbytes,
        without_paths(health.detail),
    )


def _readiness(path: str, about: str) -> Route:
    others = {503: ReadyReply}
    return Route("GET", path, ready, about, reply=ReadyReply, guarded=False, serves=False, others=others)


ROUTES = [
    Route("GET", "/health/live", live, "Whether the process lives", reply=LiveReply, guarded=False, serves=False),
    _readiness("/health/ready", "Whether it serves"),
    _readiness("/health", "The same"),
]
