"""Bytes on an HTTP connection: answers that are HTTP, none of them a 500, and an end."""

import asyncio
import socket

import httptools

from tests.fuzz.live_engine import LiveEngine
from tests.fuzz.source import Source, damaged

BODY = b'{"prompt": [5, 6], "max_tokens": 2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
REQUESTS = (
    HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health/live HTTP/1.0\r\n\r\n",
    b"GET /page/..%2f..%2fetc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nOrigin: http://x\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nabcde",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)
PIECES: tuple[bytes, ...] = (
    b"\r\n",
    b"\n",
    b"\0",
    b"\r\n\r\n",
    b" ",
    b":",
    b"Content-Length: 0\r\n",
    b"Content-Length: -1\r\n",
    b"chunked",
)
PIECES += (
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Content-Length: 99999999999999999999\r\n",
)
PIECES += (
    b"Host: evil.example\r\n",
    b"Host: \xff\r\n",
    b"Connection: close\r\n",
    b"ffffffffffffffff\r\n",
    b"X: " + b"a" * 70_000,
)
PIECES += (b"Content-Length: 18446744073709551616\r\n", b"%00", b"/../", b"?a=b", b"HTTP/9.9", b"Expect: x\r\n")


class _Answers:
    """What httptools calls."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.statuses.append(self.parser.get_status_code())


def one_input(data: bytes) -> None:
    source = Source(data)
    sent = b"".join(source.pick(REQUESTS) for _ in range(1 + source.byte() % 2))
    for _ in range(source.byte() % 3):
        at = source.below(len(sent) + 1)
        sent = damaged(source, sent) if source.byte() & 1 else sent[:at] + source.pick(PIECES) + sent[at:]
    sent += source.chunk() if source.byte() < 64 else b""
    engine = LiveEngine.running()
    got = engine.over(_exchange(engine.rig.port, sent, len(sent) if source.byte() & 1 else source.below(len(sent) + 1)))
    answers = _Answers()
    if b"HEAD " not in sent:  # to which an answer's length is that of nothing
        answers.parser.feed_data(got)
        assert not {500, 501, 502} & set(answers.statuses) - {501}, got[:500]
    assert b"Traceback" not in got


async def _exchange(port: int, sent: bytes, first: int) -> bytes:
    """All that comes back until the other side hangs up; we stop sending after `sent`."""
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.setblocking(False)
        got = b""
        try:
            await loop.sock_sendall(peer, sent[:first])
            await asyncio.sleep(0)
            await loop.sock_sendall(peer, sent[first:])
            peer.shutdown(socket.SHUT_WR)
            while part := await loop.sock_recv(peer, 65536):
                got += part
        except (ConnectionError, OSError):  # it hung up on us over what it had not read
            pass
        return got
