"""/flush_cache: as if the engine had just been started, under SGLang's name."""

from typing import Literal

from msgspec import Struct
from starlette.responses import Response

from scheduler.http.front import Call, Front, Route
from scheduler.http.models import json_response


class FlushReply(Struct, frozen=True):
    """Nothing is cached, and no expert in a slot."""

    status: Literal["flushed"] = "flushed"


async def flush(front: Front, call: Call[None]) -> Response:
    """200 once it is so for all workers; 409 while a request runs or waits, of this front or of another client."""
    await front.client.flush()
    return json_response(FlushReply())


ROUTES = [
    Route(
        "POST",
        "/flush_cache",
        flush,
        "Forget cached prefixes and the experts in slots, when no request runs",
        reply=FlushReply,
        serves=False,
        refusals=(409,),
    )
]
