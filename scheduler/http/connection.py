"""One HTTP connection: uvicorn's protocol, with limits on what a client may leave undone."""

import asyncio
import json
import sys
import time
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from scheduler.http.app import ABORT
from scheduler.http.errors import RETRY_QUEUE_S

MAX_CONNECTIONS = 400 if sys.platform == "win32" else 800
"""Connections that are served at a time. For a further one the connection that has been idle for longest is closed; if
none is idle it is told 503. Windows waits for 512 at a time; elsewhere OPEN_FILES leave room for all else."""

OPEN_FILES = 1024
"""Files and sockets that the process must be allowed to have."""

HEADERS_S = 30.0
"""Seconds within which a request's headers must have arrived, from the connection or from their first byte on. One that
sends them byte by byte holds a place of MAX_CONNECTIONS no longer; a slow link needs a second."""

MAX_HEADERS_NBYTES = 64 * 2**10
"""Of one request's line and headers, held until they are complete; more is refused with 431. Cookies of a browser take
some kB."""

KEEP_ALIVE_S = 30
"""Seconds that a connection without a request is kept: clients that ask again within them need no new one. It costs a
file of OPEN_FILES meanwhile."""

UNREAD_S = 30.0
"""Seconds after which a connection is ended if of the answer's last bytes fewer than UNREAD_NBYTES were read: nobody
reads there any more, and what is unread takes memory."""

UNREAD_NBYTES = 64 * 2**10
"""What a client has to read in UNREAD_S, 2 kB a second, for its connection to be kept."""

WATCH_S = 5.0
"""How often a connection's limits of time are looked at, and by how much each is overrun at most."""


class Connection(HttpToolsProtocol):
    """See the limits above. What uvicorn answers by itself has OpenAI's shape here.

    Of uvicorn's two parsers: a write takes 0.6 us with httptools and 3.1 with h11, a request 19 and 68 (AMD EPYC,
    2026-11).
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, unless there are too many."""
        super().connection_made(transport)
        self._headers_nbytes = 0
        self._deaf = False  # what comes is not read any more
        self._reading_since_s: float | None = self.loop.time()  # headers; None while none are awaited
        self._unread_nbytes = 0
        self._unread_since_s = self.loop.time()
        self._idle_since_s = time.perf_counter()  # finer than the loop's clock
        self._watching = self.loop.call_later(WATCH_S, self._watch)
        if len(self.connections) > MAX_CONNECTIONS and not self._make_room():
            self._refuse("503 Service Unavailable", "service_unavailable", "overloaded", "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """End the watch too."""
        self._watching.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count bytes up to the headers' end, whether more comes with them or not."""
        if self._deaf or self.transport.is_closing():
            return
        if not self._answering and self._reading_since_s is None:
            self._reading_since_s, self._headers_nbytes = self.loop.time(), 0
        self._unset_keepalive_if_required()
        if self._reading_since_s is None:
            return self._parse(data)
        room = MAX_HEADERS_NBYTES - self._headers_nbytes  # no more than this is parsed before the headers' end
        self._headers_nbytes += min(room, len(data))
        self._parse(data[:room])
        if len(data) <= room or self._deaf or self.transport.is_closing():
            return
        if self._reading_since_s is None:
            self._parse(data[room:])
        else:
            self._refuse(
                "431 Request Header Fields Too Large",
                "invalid_request_error",
                "headers_too_large",
                f"the headers have more than {MAX_HEADERS_NBYTES} bytes",
            )

    def on_message_begin(self) -> None:
        """Offer the app what ends the connection at once.

        A request that comes before the one ahead of it is answered is not taken, from its first byte on: the connection
        ends after that answer, as HTTP allows. uvicorn would stop reading, and then not notice that the client leaves.
        """
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]
        if self._answering:
            self.cycle.keep_alive, self._deaf = False, True

    def on_headers_complete(self) -> None:
        """They are there."""
        if not self._deaf and not self._asks_upgrade:
            self._reading_since_s = None
            if self.parser.get_http_version() == "1.0":  # uvicorn ends such a connection with its first answer
                self.app = self._served_without_chunks
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body of the request that is served; not of one behind it."""
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of that body."""
        if not self._deaf and not self._asks_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Idle from now on."""
        self._idle_since_s = time.perf_counter()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What was sent is no HTTP: said at once, unless a request that came whole before it has to be answered."""
        if self._answering and (self.cycle.response_started or not self.cycle.more_body):
            self.cycle.keep_alive, self._deaf = False, True
            if self.cycle.more_body:  # of what was refused early, whose rest is only taken
                self.cycle.more_body = False
                self.cycle.message_event.set()
            return
        if self._answering:  # the app is told that the client has left
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refuse("400 Bad Request", "invalid_request_error", "malformed_http", "this is not HTTP/1.1")

    async def _served_without_chunks(self, scope: Any, receive: Any, send: Any) -> None:
        """The app for HTTP/1.0, which has no chunks: an answer of unknown length ends with the connection."""
        cycle = self.cycle
        cycle.chunked_encoding = False

        async def send_plainly(message: Any) -> None:
            if message["type"] == "http.response.body":  # uvicorn would hold it to a length
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self.config.loaded_app(scope, receive, send_plainly)

    def _parse(self, data: bytes) -> None:
        """Have the parser read `data`.

        It stops after headers that ask for another protocol, as JDK's HttpClient does with every first request and
        `curl --http2` with all, and cannot go on with the body; uvicorn drops it. A server may answer in HTTP/1.1 all
        the same (RFC 9110, 7.8): a new parser gets the same headers without what asks, and then the rest.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if self._asks_upgrade and not self._deaf:
                head = self._plain_head()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                self._parse(head + data[stop.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _plain_head(self) -> bytes:
        """The request that the parser has just read, up to its body, without its Upgrade."""
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([line, *kept, b"", b""])

    @property
    def _asks_upgrade(self) -> bool:
        """Whether the request that is being read asks for another protocol. CONNECT is none that we have."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    @property
    def _answering(self) -> bool:
        """Whether a request has come whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _idle(self) -> bool:
        """Whether nothing of a request has come, and nothing of an answer is left."""
        begun = self._reading_since_s is not None and self._headers_nbytes > 0
        return not (self._answering or begun or self.transport.is_closing() or self.transport.get_write_buffer_size())

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest, but this; whether there was one."""
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self and one._idle]
        if not others:
            return False
        min(others, key=lambda one: one._idle_since_s).transport.close()
        return True

    def _refuse(self, status: str, kind: str, code: str, message: str) -> None:
        """Answer while nothing of another answer has left, and close."""
        if self.transport.is_closing():
            return
        error: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": code}
        body = json.dumps({"error": error})
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        if kind == "service_unavailable":
            head += f"\r\nretry-after: {RETRY_QUEUE_S}"
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n{body}".encode())
        self.transport.close()

    def _watch(self) -> None:
        now_s = self.loop.time()
        self._watching = self.loop.call_later(WATCH_S, self._watch)
        if self._reading_since_s is not None and now_s - self._reading_since_s > HEADERS_S:
            self._reading_since_s = None
            self._refuse("408 Request Timeout", "invalid_request_error", "headers_timeout", "no headers came in time")
        unread = self.transport.get_write_buffer_size()
        streaming = self._answering and self.cycle.response_started and not self.transport.is_closing()
        written = unread > self._unread_nbytes  # since the last look
        if streaming or written or not unread or unread <= self._unread_nbytes - UNREAD_NBYTES:
            self._unread_nbytes, self._unread_since_s = unread, now_s
        elif now_s - self._unread_since_s > UNREAD_S:
            self.transport.abort()


def allow_open_files() -> None:
    """Have the system allow OPEN_FILES, if it lets us; macOS begins with 256."""
    try:
        import resource
    except ModuleNotFoundError:  # on Windows, which has no such limit
        return
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
