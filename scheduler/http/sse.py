"""Answers that are sent while they are made: server-sent events, `data: JSON` and a blank line each."""

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from copyengine.wire.errors import SlotstreamError
from copyengine.wire.logs import Log
from scheduler.http.answering import TooSlow
from scheduler.http.error_log import log_http_error
from scheduler.http.errors import ApiError, api_error, internal
from scheduler.http.wording import Wording

DONE = b"data: [DONE]\n\n"

log = Log(__name__)
_encode = msgspec.json.Encoder().encode


def event(data: object) -> bytes:
    """One event with `data` as JSON."""
    return b"data: %b\n\n" % _encode(data)


class EventStream(Response):
    """Sends what `events` yields, each at once.

    `events` is begun by whoever serves the response, and closed whatever happens. What it raises before it first yields
    is the HTTP request's error, so it should yield, if only b"", as soon as nothing can be refused any more; what it
    raises later is sent as an event with `error`, in `wording`, and ends the stream without [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], request_id: str) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._request_id = request_id
        self.wording = Wording()
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what `events` raises before the first event, and TooSlow, whether of `events` or of `send`."""
        async with contextlib.aclosing(self._events) as events:
            body = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await _write(send, body)
                async for body in events:
                    await _write(send, body)
            except TooSlow:
                raise
            except Exception as error:
                await _write(send, event(self._told(error).body))
        await _write(send, b"", more=False)

    def _told(self, error: Exception) -> ApiError:
        match error:
            case ApiError():
                log_http_error(self._request_id, self.status_code, error)
                return error
            case SlotstreamError():
                told = api_error(error, self._request_id, self.wording)
                log_http_error(self._request_id, self.status_code, error)
                return told
        log.failed("http_failed", error, words=False, id=self._request_id)
        return internal(self._request_id)


async def _write(send: Send, body: bytes, more: bool = True) -> None:
    """Send a part of a body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})
