"""Reads requests' bodies, within limits of size and time."""

import asyncio
import contextlib
import gc
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from scheduler.http.errors import ApiError, invalid, malformed

BODY_S = 120.0
"""Seconds that a body may take to arrive: 8 MiB over half a megabit a second. One that comes drop by drop holds its
part of BODIES_AT_A_TIME so long at most; then it is refused with 408."""

LINGER_S = 2.0
"""Seconds for which what a client still sends is taken after an early refusal, so that it reads the refusal: a
connection that is closed over unread bytes is reset, which may take the answer with it."""


LARGE_NBYTES = 256 * 2**10
"""A body from which so much may be made that the collector would look through all of it again and again: 8 MiB of empty
lists took 1.28 s with it, and 0.27 s without (AMD EPYC, 2026-11)."""


class ClientLeft(Exception):
    """The client is gone; nobody reads an answer."""


class Room:
    """Bounds the bodies that are held at a time: each to `most_nbytes`, all together to `all_nbytes`."""

    def __init__(self, most_nbytes: int, all_nbytes: int) -> None:
        self.most_nbytes = most_nbytes
        self.all_nbytes = all_nbytes
        self.held_nbytes = 0


class Body:
    """One request's body. It takes room from `read` to `release`."""

    def __init__(self, room: Room, headers: Headers, receive: Receive) -> None:
        self._room = room
        self._stated = headers.get("content-length", "")
        self._receive = receive
        self._nbytes = 0
        self.unread = self._stated not in ("", "0") or "transfer-encoding" in headers  # the client still sends

    async def read(self) -> bytes:
        """All of it. ApiError 413, 408 or 503, ClientLeft."""
        if self._stated.isdecimal():
            self._check(int(self._stated))
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    parts.append(message.get("body", b""))
                    self._nbytes += len(parts[-1])
                    self._room.held_nbytes += len(parts[-1])
                    self._check(self._nbytes)
                    if not message.get("more_body", False):
                        self.unread = False
                        return b"".join(parts)
        except TimeoutError:
            text = f"the body did not arrive within {BODY_S:g} s"
            raise ApiError(408, "invalid_request_error", text, code="body_timeout") from None

    def release(self) -> None:
        """Nothing of it is held any more. No-op the second time."""
        self._room.held_nbytes -= self._nbytes
        self._nbytes = 0

    async def linger(self) -> None:
        """Take what the client still sends, for LINGER_S at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while self.unread:
                    message = await self._receive()
                    self.unread = message["type"] != "http.disconnect" and message.get("more_body", False)

    def _check(self, nbytes: int) -> None:
        room = self._room
        if nbytes > room.most_nbytes:
            text = f"the body has more than the {room.most_nbytes} bytes of --http-max-body-bytes"
            raise ApiError(413, "invalid_request_error", text, code="body_too_large")
        if room.held_nbytes > room.all_nbytes:
            text = "the bodies of other requests take all the room there is for bodies"
            raise ApiError(503, "service_unavailable", text, code="overloaded", retry_after_s=1)


def check_headers(headers: Headers, takes_json: bool) -> None:
    """ApiError for what is asked of us, or said of the body, that we do not have: ignored, it would be misread."""
    coding = _all_of(headers, "transfer-encoding")
    if coding not in ("", "chunked"):
        text = f"Transfer-Encoding {coding!r} is not supported, only chunked"
        raise ApiError(501, "invalid_request_error", text, code="unsupported_transfer_encoding")
    expected = _all_of(headers, "expect")
    if expected not in ("", "100-continue"):
        text = f"Expect {expected!r} is not supported, only 100-continue"
        raise ApiError(417, "invalid_request_error", text, code="unsupported_expectation")
    if not takes_json:
        return
    if (packed := _all_of(headers, "content-encoding")) not in ("", "identity"):
        raise _other_type(f"Content-Encoding {packed!r} is not supported: send the body as it is")
    kind, *parameters = headers.get("content-type", "").lower().split(";")
    if kind.strip() != "application/json":  # a page of another site, open in a browser here, may send others unasked
        raise _other_type(f"the body must be JSON, with Content-Type: application/json, not {kind.strip() or 'none'}")
    for name, _, value in (parameter.partition("=") for parameter in parameters):
        if name.strip() == "charset" and (charset := value.strip().strip('"')) != "utf-8":
            raise _other_type(f"the charset {charset!r} is not supported: JSON is UTF-8")


def _all_of(headers: Headers, name: str) -> str:
    """A header's value, of several lines also, in small letters; empty without one."""
    return ",".join(headers.getlist(name)).strip().lower()


def _other_type(text: str) -> ApiError:
    return ApiError(415, "invalid_request_error", text, code="unsupported_media_type")


def decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """What `body` holds. ApiError if it is not JSON, or not what `decoder` takes."""
    pause = len(body) >= LARGE_NBYTES and gc.isenabled()
    if pause:
        gc.disable()
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise malformed(error) from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="malformed_json") from None
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from None
    finally:
        if pause:
            gc.enable()
