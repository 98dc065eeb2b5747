"""/openapi.json: what is served, as OpenAPI 3.1 has it, made from the routes and their Structs."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from scheduler.http.errors import ErrorReply
from scheduler.http.front import Call, Front, Route
from scheduler.http.models import engine_version

REF = "#/components/schemas/{name}"
JSON, EVENTS = "application/json", "text/event-stream"
KEY = "key"
"""What the security scheme is called."""

ERRORS = {
    400: "The request is wrong: `param` says where, `code` what program can tell apart.",
    401: "The key is missing, or another one.",
    404: "There is no such thing: another model than the served one, say.",
    408: "Headers or body did not arrive in time.",
    409: "Requests run or wait that this would disturb; ask again when they have ended.",
    413: "The body is too large.",
    415: "The body is said to be something else than JSON in UTF-8, or packed.",
    417: "Something else than 100-continue is expected.",
    429: "As many requests wait as may; ask again later.",
    431: "The headers are too large.",
    500: "A bug, or a model that computes no numbers. The engine's log has more under the answer's x-request-id.",
    501: "The body's transfer coding is another than chunked.",
    503: "Loading, restarting, draining or overloaded; ask again later.",
}
"""All with an ErrorReply."""

RETRIED = (429, 503)
"""Those with Retry-After."""

ANY_REQUEST = (400, 408, 413, 417, 431, 500, 501, 503)
"""What may become of any request whatsoever: a body is read, and refused, whether the route takes one or not."""


def described(routes: Sequence[Route]) -> Route:
    """The route that describes `routes` and itself."""
    all_routes = list(routes)

    @functools.lru_cache(maxsize=1)  # it takes 10 ms (AMD EPYC, 2026-11)
    def encoded(model: str, has_key: bool) -> bytes:
        return msgspec.json.encode(document(all_routes, model, has_key))

    async def describe(front: Front, call: Call[None]) -> Response:
        return Response(encoded(front.model, bool(front.config.api_key)), media_type=JSON)

    all_routes.append(Route("GET", "/openapi.json", describe, "This description", serves=False))
    return all_routes[-1]


def document(routes: Sequence[Route], model: str, has_key: bool) -> dict[str, Any]:
    """The description of `routes`, of which the guarded ones ask for a key if there is one; they serve `model`."""
    types = dict.fromkeys([ErrorReply, *(kind for route in routes for kind in _types(route))])
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    refs = dict(zip(types, schemas, strict=True))
    _name_model([refs[route.body] for route in routes if _names_model(route)], components, model)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, refs, has_key)
    described: dict[str, Any] = {"schemas": components, "responses": _error_responses(refs[ErrorReply])}
    if has_key:
        described["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer", "description": "--api-key"}}
    info = {"title": "slotstream", "version": engine_version(), "description": "OpenAI-compatible HTTP"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": described}


def _types(route: Route) -> list[Any]:
    """Those that have a schema."""
    return [kind for kind in (route.body, route.reply, route.event, *route.others.values()) if kind is not None]


def _name_model(bodies: list[dict[str, Any]], components: dict[str, Any], model: str) -> None:
    """Have these say that there is one model only."""
    for body in bodies:
        properties = components[body["$ref"].rpartition("/")[2]]["properties"]
        properties["model"] = {**properties["model"], "enum": [model, None]}


def _operation(route: Route, refs: dict[Any, Any], has_key: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": route.about,
        "responses": {"200": _answer(route, refs)},
    }
    names = re.findall(r"\{(\w+)\}", route.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": refs[route.body]}}}
    if has_key and route.guarded:
        operation["security"] = [{KEY: []}]
    for status in _errors(route, has_key):
        operation["responses"][str(status)] = {"$ref": f"#/components/responses/{status}"}
    for status, kind in route.others.items():
        either = {"anyOf": [refs[kind], refs[ErrorReply]]}
        operation["responses"][str(status)] = _response(ERRORS[status], {JSON: {"schema": either}}, status in RETRIED)
    return operation


def _answer(route: Route, refs: dict[Any, Any]) -> dict[str, Any]:
    if route.reply is None:
        return _response("As the type says.", {media: {} for media in route.media})
    content: dict[str, Any] = {media: {"schema": refs[route.reply]} for media in route.media}
    if route.event is None:
        return _response("The answer.", content)
    content[EVENTS] = {"schema": _events(refs[route.event], refs[ErrorReply])}
    return _response("The answer; with `stream` as events.", content)


def _events(event: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """Each event, as later versions of OpenAPI have it: 3.1 knows no streams."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": [event, error]}}
    told = "One event of the stream. The last one is [DONE]; after one with an error comes none."
    return {
        "type": "object",
        "description": told,
        "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _errors(route: Route, has_key: bool) -> list[int]:
    """The statuses that an error of this route may have."""
    statuses = {*ANY_REQUEST}
    if has_key and route.guarded:
        statuses.add(401)
    if "{" in route.path or _names_model(route):
        statuses.add(404)
    if route.body is not None:
        statuses.add(415)
    if route.serves:
        statuses.add(429)
    return sorted(statuses | {*route.refusals})


def _names_model(route: Route) -> bool:
    """Whether the body may name another model than the served one."""
    return "model" in getattr(route.body, "__struct_fields__", ())


def _error_responses(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        str(status): _response(about, {JSON: {"schema": schema}}, status in RETRIED) for status, about in ERRORS.items()
    }


def _response(about: str, content: dict[str, Any], retried: bool = False) -> dict[str, Any]:
    if not retried:
        return {"description": about, "content": content}
    header = {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}
    return {"description": about, "content": content, "headers": {"Retry-After": header}}
