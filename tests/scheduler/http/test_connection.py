"""What a client may leave undone on its connection, and for how long; with limits made short."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from scheduler.http import connection, writing
from tests.scheduler.http.rig import Connection, serving
from tests.scheduler.rig import on_loop


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WATCH_S", 0.05)


async def refusal(client: Connection) -> tuple[bytes, str]:
    """Status and code of what the server says before it ends the connection."""
    head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return head.split()[1], error["code"]


@pytest.mark.parametrize(
    "sent", [b"", b"G", b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"], ids=["nothing", "a byte", "half"]
)
def test_headers_must_come_in_time(model: Path, event_loop: str, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """On a new connection and on one that has had an answer."""
    monkeypatch.setattr(connection, "HEADERS_S", 0.3)

    async def main() -> None:
        async with serving(model) as rig:
            for used in (False, True):
                slow = Connection(rig.port)
                if used:
                    await slow.send(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                    await slow.until(b"live")
                if sent or not used:  # else it is kept for other requests, see below
                    await slow.send(sent)
                    assert await refusal(slow) == (b"408", "headers_timeout")
                slow.close()
            await rig.gone()

    on_loop(event_loop, main)


def test_a_connection_without_requests_is_kept_so_long(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            rig.server.config.timeout_keep_alive = 1
            idle = Connection(rig.port)
            await idle.send(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await idle.until(b"live")
            assert await idle.rest() == b""
            idle.close()

    on_loop("selector", main)


def test_headers_have_a_size(model: Path, event_loop: str) -> None:
    """In one header or in many; just below it they are served, however they are cut."""

    async def main() -> None:
        async with serving(model) as rig:
            for header in (b"X: " + b"y" * 70_000 + b"\r\n", b"X: y\r\n" * 12_000):
                large = Connection(rig.port)
                await large.send(b"GET /health/live HTTP/1.1\r\n" + header)
                assert await refusal(large) == (b"431", "headers_too_large")
                large.close()
            good = Connection(rig.port)
            request = b"GET /health/live HTTP/1.1\r\nX: " + b"y" * 60_000 + b"\r\n\r\n"
            for i in range(0, len(request), 10_000):
                await good.send(request[i : i + 10_000])
                await asyncio.sleep(0.01)
            assert b"200 OK" in await good.until(b"live")
            good.close()

    on_loop(event_loop, main)


@pytest.mark.parametrize("over", [0, 1])
def test_the_size_of_headers_is_counted_to_the_byte(model: Path, event_loop: str, over: int) -> None:
    """Whatever comes with them in one packet, on a new connection and on a used one, and with an upgrade."""
    body = b'{"prompt": [5], "max_tokens": 1%b}' % (b" " * 100_000)

    async def main() -> None:
        async with serving(model) as rig:
            for more in ([], [b"Upgrade: h2c", b"Connection: Upgrade"]):
                bare = len(request(body, *more, b"X: ")) - len(body)
                large = request(body, *more, b"X: " + b"y" * (connection.MAX_HEADERS_NBYTES - bare + over))
                for used in (False, True):
                    client = Connection(rig.port)
                    await rig.there(1)
                    (served,) = rig.server.server_state.connections
                    if used:
                        await client.post(prompt=[5], max_tokens=1)
                        await client.until(b"total_tokens")
                    assert isinstance(served, connection.Connection)
                    served.data_received(large)  # a socket might cut it
                    if over:
                        assert await refusal(client) == (b"431", "headers_too_large")
                    else:
                        assert answers(await client.until(b"total_tokens")) == [b"200"]
                    client.close()
                    await rig.gone()

    on_loop(event_loop, main)


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 100]
)
def test_what_is_no_http_is_told_so(model: Path, junk: bytes) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            client = Connection(rig.port)
            await client.send(junk)
            assert await refusal(client) == (b"400", "malformed_http")
            client.close()
            assert (await rig.post(prompt=[5], max_tokens=1)).status_code == 200

    on_loop("selector", main)


def test_there_are_so_many_connections_and_no_more(
    model: Path, event_loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)

    async def main() -> None:
        async with serving(model) as rig:
            held = [Connection(rig.port) for _ in range(3)]
            for one in held:
                await one.send(b"GET /health/live HTTP/1.1\r\n")  # begun
            await rig.there(3)
            further = Connection(rig.port)
            head, _, body = (await further.rest()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "overloaded"
            further.close()
            for one in held:
                await one.send(b"Host: 127.0.0.1\r\n\r\n")
                await one.until(b"live")
                one.close()
            await rig.gone()
            assert (await rig.http.get("/health/live")).status_code == 200

    on_loop(event_loop, main)


def test_who_waits_makes_room_for_who_asks(model: Path, event_loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has asked nothing for longest; not who gets an answer."""
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    health = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"

    async def main() -> None:
        async with serving(model) as rig:
            rig.engine.worker.gate.clear()
            asking, never, once = held = [Connection(rig.port) for _ in range(3)]
            await asking.post(prompt=[5], max_tokens=3)
            await rig.engine.settled(1)
            await once.send(health)
            await once.until(b"live")
            for closed in (never, once):
                held.append(Connection(rig.port))
                await held[-1].send(health)
                await held[-1].until(b"live")
                assert await closed.receive() == b""
            rig.engine.worker.gate.set()
            await asking.until(b"text_completion")
            for one in held:
                one.close()
            await rig.gone()

    on_loop(event_loop, main)


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limit")
def test_so_many_sockets_are_allowed() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for soft, after in ((512, connection.OPEN_FILES), (1500, 1500)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, before[1]), before[1]))
            connection.allow_open_files()
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(after, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("together", [True, False])
def test_a_request_sent_before_the_answer_to_the_one_ahead(model: Path, event_loop: str, together: bool) -> None:
    """Is not answered: the connection ends after that answer. And that the client leaves is noticed all the same."""

    async def main() -> None:
        async with serving(model) as rig:
            rig.engine.worker.step_s = 0.01
            second = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            body = b'{"prompt": [5], "max_tokens": 5}'
            head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            for count, leaves in ((b"5", False), (b"4000", True)):
                content = body.replace(b"5}", count + b"}")
                client = Connection(rig.port)
                await client.send(head % len(content) + content + (second if together else b""))
                if not together:
                    await rig.engine.settled(1)
                    await client.send(second * 2000)
                if leaves:
                    await rig.engine.settled(1)
                    client.close()
                else:
                    got = await client.rest()
                    assert got.count(b"HTTP/1.1 200 OK") == 1 and b"text_completion" in got
                    client.close()
                await rig.at_rest()
                await rig.gone()
            assert (await rig.front.client.stats()).aborted == 1

    on_loop(event_loop, main)


def request(body: bytes, *headers: bytes, version: bytes = b"1.1", length: bytes = b"") -> bytes:
    """A POST to /v1/completions, whose length is stated unless `headers` say otherwise."""
    lines = [b"POST /v1/completions HTTP/" + version, b"Host: 127.0.0.1", b"Content-Type: application/json", *headers]
    if not any(header.startswith(b"Transfer-Encoding") for header in headers):
        lines.append(b"Content-Length: " + (length or b"%d" % len(body)))
    return b"\r\n".join([*lines, b"", body])


def answers(got: bytes) -> list[bytes]:
    """The statuses of the answers in `got`."""
    return re.findall(rb"HTTP/1\.1 (\d+)", got)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (b'{"prompt": [5], "max_tokens": 1', b', "logprobs": 5}', b"400"),
        (b'{"prompt": [5], "max_tokens": 1}', b"}", b"200"),
    ],
)
def test_bodies_of_two_requests_are_not_mixed(
    model: Path, event_loop: str, first: bytes, second: bytes, status: bytes, apart: bool
) -> None:
    """The first is answered as if it came alone, whether the second comes in the same packet or half of it does."""

    async def main() -> None:
        async with serving(model) as rig:
            client = Connection(rig.port)
            both = request(first) + request(second) + request(b"")
            cut = len(both) if not apart else len(request(first)) + 30
            await client.send(both[:cut])
            if apart:
                await client.send(both[cut:])
            got = await client.rest()
            assert answers(got) == [status] and b"connection: close" in got
            client.close()
            await rig.gone()

    on_loop(event_loop, main)


def chunked(body: bytes) -> bytes:
    """`body` in two chunks."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:])) + b"0\r\n\r\n"


UPGRADES = {
    "jdk": [b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAN_", b"Upgrade: h2c"],
    "websocket": [b"upgrade:websocket", b"connection: keep-alive, upgrade"],
}


@pytest.mark.parametrize("client", UPGRADES)
def test_who_offers_another_protocol_is_served_in_this_one(model: Path, event_loop: str, client: str) -> None:
    """The same answer as without, several times on one connection, wherever packets are cut."""
    body = b'{"prompt": [5], "max_tokens": 2}'

    async def main() -> None:
        async with serving(model) as rig:
            expected = (await rig.post(prompt=[5], max_tokens=2)).json()["choices"]
            one = Connection(rig.port)
            stated = request(body, *UPGRADES[client])
            head, _, content = request(chunked(body), b"Transfer-Encoding: chunked", *UPGRADES[client]).partition(b"{")
            in_chunks = head + b"{" + content
            for sent in (stated, in_chunks):
                for cut in (0, 30, sent.index(b"pgrade") + 3, sent.index(b"\r\n\r\n") + 2, len(sent) - len(body), -3):
                    for part in (sent[:cut], sent[cut:]):
                        await one.send(part)
                        await asyncio.sleep(0.01)
                    got = await one.until(b"total_tokens")
                    got = got if got.endswith(b"}") else got + await one.receive()
                    assert answers(got) == [b"200"]
                    assert json.loads(got.partition(b"\r\n\r\n")[2])["choices"] == expected
            await one.send(request(body, b"Connection: close"))
            assert answers(await one.rest()) == [b"200"]
            one.close()

    on_loop(event_loop, main)


def test_upgrades_with_no_body_behind_another_and_with_a_bad_body(model: Path) -> None:
    upgrade = UPGRADES["jdk"]
    get = b"\r\n".join([b"GET /health/live HTTP/1.1", b"Host: 127.0.0.1", *upgrade, b"", b""])
    body = b'{"prompt": [5], "max_tokens": 2}'

    async def main() -> None:
        async with serving(model) as rig:
            for sent, status in (
                (get.replace(b"Upgrade, ", b"Upgrade, close, "), b"200"),
                (get + get, b"200"),
                (request(body, *upgrade) + request(body[:-1], *upgrade), b"200"),
                (request(body[:-1], *upgrade) + request(b"}", *upgrade), b"400"),
                (b"CONNECT localhost:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"400"),
            ):
                client = Connection(rig.port)
                await client.send(sent)
                assert answers(await client.rest()) == [status], sent
                client.close()

    on_loop("selector", main)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("size", [b"zz", b"-5", b"f" * 17, b"5;\0"])
def test_a_body_that_is_no_http_is_told_so(model: Path, event_loop: str, size: bytes, later: bool) -> None:
    """With its headers or after them, in its first chunk or its second. Nothing comes to the engine."""

    async def main() -> None:
        async with serving(model) as rig:
            for ahead in (b"", b'8\r\n{"prompt\r\n'):
                client = Connection(rig.port)
                sent = request(ahead + size + b"\r\nabc\r\n", b"Transfer-Encoding: chunked")
                cut = sent.index(b"\r\n\r\n") + 4 + len(ahead) if later else 0
                await client.send(sent[:cut])
                if later:
                    await asyncio.sleep(0.02)
                await client.send(sent[cut:])
                assert await refusal(client) == (b"400", "malformed_http")
                client.close()
                await rig.gone()
                await rig.at_rest()
            assert (await rig.front.client.stats()).finished == 0

    on_loop(event_loop, main)


def test_what_is_no_http_behind_a_request(model: Path, event_loop: str) -> None:
    """Takes nothing from the request's answer, in the same packet or while it is made; then the connection ends."""

    async def main() -> None:
        async with serving(model) as rig:
            rig.engine.worker.step_s = 0.01
            body = b'{"prompt": [5], "max_tokens": 5}'
            for junk in (b"JUNK JUNK\r\n\r\n", b"\0" * 100, b"GET / HTTP/9.9\r\n\r\n"):
                for apart in (False, True):
                    client = Connection(rig.port)
                    await client.send(request(body) + (b"" if apart else junk))
                    if apart:
                        await rig.engine.settled(1)
                        await client.send(junk)
                    head, _, content = (await client.rest()).partition(b"\r\n\r\n")
                    assert answers(head) == [b"200"] and b"connection: close" in head
                    assert json.loads(content)["usage"]["completion_tokens"] == 5
                    client.close()
            client = Connection(rig.port)
            await client.send(request(body, length=b"10"))
            head, _, content = (await client.rest()).partition(b"\r\n\r\n")
            assert answers(head) == [b"400"] and b"truncated" in content  # its ten bytes are no JSON
            client.close()
            await rig.gone()

    on_loop(event_loop, main)


def test_a_bad_body_behind_an_early_refusal(model: Path, event_loop: str) -> None:
    """The refusal is whole, and the end comes as soon as there is nothing more to take."""

    async def main() -> None:
        async with serving(model, http_max_body_bytes=100) as rig:
            client = Connection(rig.port)
            await client.send(request(b"c8\r\n" + b" " * 200, b"Transfer-Encoding: chunked"))
            await client.until(b"body_too_large")
            await client.send(b"\r\nzz\r\n")
            assert await client.rest() == b""
            client.close()
            await rig.gone()

    on_loop(event_loop, main)


def test_http_1_0_has_no_chunks(model: Path, event_loop: str) -> None:
    """A stream is what it is in HTTP/1.1, up to the connection's end; other answers have their length all the same."""

    async def main() -> None:
        async with serving(model) as rig:
            body = b'{"prompt": [5], "max_tokens": 3%b}'
            for more in (b"", b', "stream": true'):
                for kept in (b"X: y", b"Connection: keep-alive"):
                    client = Connection(rig.port)
                    await client.send(request(body % more, kept, version=b"1.0"))
                    head, _, content = (await client.rest()).partition(b"\r\n\r\n")
                    assert answers(head) == [b"200"] and b"connection: close" in head
                    assert b"transfer-encoding" not in head and (b"content-length" in head) == (not more)
                    if more:
                        *events, end, empty = content.split(b"\n\n")
                        texts = [json.loads(one.removeprefix(b"data: "))["choices"][0]["text"] for one in events]
                        assert (end, empty) == (b"data: [DONE]", b"")
                        assert "".join(texts) == (await rig.post(prompt=[5], max_tokens=3)).json()["choices"][0]["text"]
                    else:
                        assert json.loads(content)["usage"]["completion_tokens"] == 3
                    client.close()
            client = Connection(rig.port)
            await client.send(request(b"[", version=b"1.0"))
            assert (await refusal(client))[0] == b"400"
            client.close()

    on_loop(event_loop, main)


LONG = 300_000
"""Words whose token ids are more than the system holds for who does not read."""

LARGE = {"facts": {"kv_tokens": 100_000, "max_position": 100_000}}
"""An engine of a context so long that they are tokenised."""


def test_an_answer_whose_end_is_not_read(model: Path, event_loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is written at once nobody waits for the end; the connection does not wait for ever."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.5)

    async def main() -> None:
        async with serving(model, engine=LARGE) as rig:
            for more in (b"", b"connection: close\r\n"):
                slow = Connection(rig.port, receive_nbytes=4096)
                content = b'{"prompt": "%b"}' % (b"ab " * LONG)
                head = b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n" + more
                await slow.send(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
                await slow.until(b"200 OK")
                await rig.at_rest()
                await rig.gone()
                slow.close()

    on_loop(event_loop, main)


@pytest.mark.parametrize("limit", ["UNREAD_S", "WRITE_S"])
def test_who_does_not_read_holds_up_no_drain_with_a_further_request(
    model: Path, event_loop: str, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Whose answer cannot even begin, behind one that is not read. Each of the two limits is enough."""
    monkeypatch.setattr(connection if limit == "UNREAD_S" else writing, limit, 0.5)

    async def main() -> None:
        async with serving(model, engine=LARGE) as rig:
            slow = Connection(rig.port, receive_nbytes=4096)
            await slow.post("/tokenize", prompt="ab " * LONG)
            await slow.until(b"200 OK")
            (served,) = rig.server.server_state.connections
            await rig.at_rest()
            assert isinstance(served, connection.Connection) and served.flow.write_paused
            await slow.post(prompt=[5], max_tokens=3)
            async with asyncio.timeout(10):
                while not rig.front._running:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await rig.front.drain()
            await rig.gone()
            slow.close()

    on_loop(event_loop, main)


def test_an_answer_whose_end_is_read_slowly_is_not_cut(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB at a time are enough."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.5)

    async def main() -> None:
        async with serving(model, engine=LARGE) as rig:
            slow = Connection(rig.port, receive_nbytes=65536)
            await slow.post("/tokenize", prompt="ab " * LONG)
            got = await slow.until(b"\r\n\r\n")
            length = int(got.lower().split(b"content-length: ")[1].split()[0])
            got = got.partition(b"\r\n\r\n")[2]
            assert length > 1_000_000
            while len(got) < length:
                part = await slow.receive(65536)
                assert part
                got += part
                await asyncio.sleep(0.01)
            reply = json.loads(got)
            assert len(reply["tokens"]) == reply["count"] >= LONG
            slow.close()

    on_loop("selector", main)
