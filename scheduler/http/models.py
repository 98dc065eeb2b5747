"""What is served: /v1/models and /version."""

from importlib import metadata
from typing import Literal

import msgspec
from msgspec import Struct
from starlette.responses import Response

from scheduler.http.errors import unknown_model
from scheduler.http.front import Call, Front, Route


class ModelReply(Struct, frozen=True):
    """One model. `created` is when the front started; `max_model_len`, the tokens of prompt and answer that one request
    may have, is null until the model has loaded."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "slotstream"


class ModelList(Struct, frozen=True):
    """All models: one."""

    data: list[ModelReply]
    object: Literal["list"] = "list"


async def list_models(front: Front, call: Call[None]) -> Response:
    """The one that is served."""
    return json_response(ModelList([await _model(front)]))


async def get_model(front: Front, call: Call[None]) -> Response:
    """The same alone. ApiError 404 for another."""
    if call.params["model"] != front.model:
        raise unknown_model(call.params["model"], front.model)
    return json_response(await _model(front))


class VersionReply(Struct, frozen=True):
    """Of this engine."""

    version: str


async def get_version(front: Front, call: Call[None]) -> Response:
    """As the installed package has it."""
    return json_response(VersionReply(engine_version()))


def engine_version() -> str:
    """As the installed package has it."""
    try:
        return metadata.version("slotstream")
    except metadata.PackageNotFoundError:
        return "unknown: not installed as a package"


async def _model(front: Front) -> ModelReply:
    return ModelReply(front.model, front.created_s, await front.engine.max_model_len() or None)


def json_response(reply: Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`reply` as JSON."""
    return Response(msgspec.json.encode(reply), status, headers, "application/json")


ROUTES = [
    Route("GET", "/v1/models", list_models, "The served model", reply=ModelList, serves=False),
    Route("GET", "/v1/models/{model}", get_model, "The served model by its name", reply=ModelReply, serves=False),
    Route("GET", "/version", get_version, "The engine's version", reply=VersionReply, serves=False),
]
