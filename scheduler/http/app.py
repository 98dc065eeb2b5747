"""The ASGI application: finds a request's route, checks key and body, serves it while its client is there."""

import asyncio
import re
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from copyengine.wire.errors import SlotstreamError
from copyengine.wire.logs import Log
from scheduler.http.access import Access
from scheduler.http.answering import TooSlow
from scheduler.http.error_log import log_http_error
from scheduler.http.errors import ApiError, api_error, draining, internal
from scheduler.http.front import Call, Front, Route
from scheduler.http.reading import Body, ClientLeft, Room, check_headers, decoded
from scheduler.http.sse import EventStream
from scheduler.http.wording import Wording
from scheduler.http.writing import patient

BODIES_AT_A_TIME = 8
"""How many bodies of the largest size are held at a time."""

ABORT = "slotstream.abort"
"""The extension of ASGI's scope under which the server offers what ends a connection at once."""

log = Log(__name__)


class App:
    """Serves `routes`, to whom Access lets; `key` is empty if none is asked for."""

    def __init__(self, front: Front, routes: Sequence[Route], key: bytes = b"") -> None:
        self._front = front
        self._access = Access(front.config.http_host, key)
        most = front.config.http_max_body_bytes
        self._room = Room(most, BODIES_AT_A_TIME * most)
        self._routes = [(_pattern(route.path), route) for route in routes]
        self._decoders = {id(route): msgspec.json.Decoder(route.body) for route in routes if route.body is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request, from its headers to the last byte of its answer."""
        request_id = f"req-{secrets.token_hex(12)}"
        try:
            await self._answer(request_id, scope, receive, patient(send))
        except TooSlow as error:
            log.warning("http_given_up", id=request_id, detail=str(error))
            await _cut_off(scope, receive)
        except asyncio.CancelledError:
            if not self._front.draining:
                raise
            await _cut_off(scope, receive)  # the process ends, and this request had not come to anything

    async def _answer(self, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        body = Body(self._room, headers, receive)
        try:
            route, params = self._admit(scope, headers)
            content = await body.read()
            await self._check_room(route)
            asked = decoded(self._decoders[id(route)], content) if id(route) in self._decoders else None
        except ClientLeft:
            return
        except ApiError as error:
            log_http_error(request_id, error.status, error)
            return await _refuse(error, request_id, body, scope, receive, send)
        finally:
            body.release()
        if route.serves:
            self._front.begin(request_id, route.asks)
        try:
            call = Call(request_id, asked, params)
            await while_there(receive, self._serve(route, call, scope, receive, send))
        finally:
            if route.serves:
                self._front.done(request_id)

    def _admit(self, scope: Scope, headers: Headers) -> tuple[Route, dict[str, str]]:
        """The route, and what its path's names stand for. ApiError for what is refused whatever the body."""
        route, params = self._route(scope["method"], scope["path"])
        self._access.check(route, headers)
        if route.serves and self._front.draining:
            raise draining()
        check_headers(headers, takes_json=route.body is not None)
        return route, params

    async def _check_room(self, route: Route) -> None:
        """ApiError 429, before anything is made of the body. Not before it is read: the connection goes on so."""
        if route.asks and await self._front.engine.places():
            self._front.check_room()

    async def _serve(self, route: Route, call: Call[Any], scope: Scope, receive: Receive, send: Send) -> None:
        """Send the endpoint's response, or the error that it, or the response before its first byte, ends with."""
        try:
            response = await route.endpoint(self._front, call)
            if isinstance(response, EventStream):
                response.wording = self._wording(call)
            response.headers["x-request-id"] = call.request_id
            return await response(scope, receive, send)
        except ApiError as error:
            response = error.response()
            log_http_error(call.request_id, error.status, error)
        except SlotstreamError as error:
            response = api_error(error, call.request_id, self._wording(call)).response()
            log_http_error(call.request_id, response.status_code, error)
        except TooSlow:
            raise
        except Exception as error:
            log.failed("http_failed", error, words=False, id=call.request_id, path=route.path)
            response = internal(call.request_id).response()
        response.headers["x-request-id"] = call.request_id
        await response(scope, receive, send)

    def _wording(self, call: Call[Any]) -> Wording:
        return Wording(call.body, self._front.engine.known_max_model_len)

    def _route(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        allowed = set()
        for pattern, route in self._routes:
            match = pattern.fullmatch(path)
            if match and method in (route.method, "HEAD" if route.method == "GET" else route.method):
                return route, match.groupdict()
            if match:
                allowed.add(route.method)
        if not allowed:
            raise ApiError(404, "not_found_error", f"there is nothing at {path[:200]}", code="not_found")
        text = f"{path[:200]} takes {' and '.join(sorted(allowed))}, not {method[:20]}"
        error = ApiError(405, "invalid_request_error", text, code="method_not_allowed")
        error.headers["allow"] = ", ".join(sorted(allowed))
        raise error


def _pattern(path: str) -> re.Pattern[str]:
    """What matches `path`, in which `{name}` stands for anything, slashes too: names of models have them."""
    parts = re.split(r"\{(\w+)\}", path)
    return re.compile("".join(f"(?P<{part}>.+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)))


async def _refuse(error: ApiError, request_id: str, body: Body, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body may not have been read to its end."""
    response = error.response()
    response.headers["x-request-id"] = request_id
    if not body.unread:
        return await response(scope, receive, send)
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await body.linger()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, whose errors are raised, and cancel it when the client leaves."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait({working, leaving})
        for task in (working, leaving):
            if not task.cancelled():
                task.exception()  # raised above, or of no interest any more


async def _cut_off(scope: Scope, receive: Receive) -> None:
    """End the connection, and do not return before the server knows, which would otherwise miss an answer."""
    scope["extensions"][ABORT]()
    await _left(receive)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
