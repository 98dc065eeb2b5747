"""Reads requests' bodies, within limits of size and time."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive

from scheduler.http.errors import ApiError

BODY_S = 120.0
"""Seconds that a body may take to arrive."""

LINGER_S = 2.0
"""Seconds for which what a client still sends is taken after an early refusal, so that it reads the refusal: a
connection that is closed over unread bytes is reset, which may take the answer with it."""


class ClientLeft(Exception):
    """The client is gone; nobody reads an answer."""


class Bodies:
    """Bounds the bodies that are held at a time: each to `most_nbytes`, all together to `all_nbytes`."""

    def __init__(self, most_nbytes: int, all_nbytes: int) -> None:
        self._most = most_nbytes
        self._all = all_nbytes
        self._held = 0

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body, to be given back with `release`. ApiError 413, 408 or 503, ClientLeft."""
        self._check_length(headers)
        parts: list[bytes] = []
        nbytes = 0
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    part = message.get("body", b"")
                    parts.append(part)
                    nbytes += len(part)
                    self._held += len(part)
                    self._check(nbytes)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except BaseException as error:
            self.release(nbytes)
            if isinstance(error, TimeoutError):
                text = f"the body did not arrive within {BODY_S:g} s"
                raise ApiError(408, "invalid_request_error", text, code="body_timeout", close=True) from None
            raise

    def release(self, nbytes: int) -> None:
        """A body of so many bytes is held no more."""
        self._held -= nbytes

    def _check_length(self, headers: Headers) -> None:
        stated = headers.get("content-length", "")
        if stated.isdecimal():
            self._check(int(stated))

    def _check(self, nbytes: int) -> None:
        if nbytes > self._most:
            text = f"the body has more than the {self._most} bytes of --http-max-body-bytes"
            raise ApiError(413, "invalid_request_error", text, code="body_too_large", close=True)
        if self._held > self._all:
            text = "the bodies of other requests take all the room there is for bodies"
            raise ApiError(503, "service_unavailable", text, code="overloaded", retry_after_s=1, close=True)


def has_body(headers: Headers) -> bool:
    """Whether the client sends one."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


async def linger(receive: Receive) -> None:
    """Take what the client still sends, for LINGER_S at most."""
    try:
        async with asyncio.timeout(LINGER_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
