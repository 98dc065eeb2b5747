"""What every request meets before its endpoint, written by hand: routes, key, body, size, and how an error looks."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.http import reading
from scheduler.http.app import App
from scheduler.http.errors import ErrorReply
from tests.scheduler.http.rig import Connection, serving
from tests.scheduler.rig import on_loop

KEY = b"a-key"
BEARER = {"Authorization": "Bearer a-key"}
JSON = {"Content-Type": "application/json"}


def error_of(reply: httpx.Response) -> tuple[int, str]:
    """Status and code of an answer of the right shape."""
    body = reply.json()
    assert set(body) == set(ErrorReply.__struct_fields__)
    assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]
    assert reply.headers["x-request-id"].startswith("req-")
    return reply.status_code, body["error"]["code"]


def test_what_is_not_there(model: Path) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            assert error_of(await rig.http.get("/nothing")) == (404, "not_found")
            assert error_of(await rig.http.get("/v1/models/")) == (404, "not_found")
            wrong = await rig.http.get("/v1/completions")
            assert error_of(wrong) == (405, "method_not_allowed") and wrong.headers["allow"] == "POST"
            assert error_of(await rig.http.put("/v1/models", content=b"x")) == (405, "method_not_allowed")
            head = await rig.http.head("/v1/models")
            assert head.status_code == 200 and head.content == b""
            assert error_of(await rig.post("/health/live")) == (405, "method_not_allowed")
            assert error_of(await rig.http.get("/v1/models/some/other")) == (404, "model_not_found")
            assert (await rig.http.get("/v1/models/made-up")).json()["id"] == "made-up"

    on_loop("selector", main)


@pytest.mark.parametrize(
    "key", ["", "Bearer", "Bearer other", "Bearer a-ke", "Basic a-key", "Bearer a-key2", "Bearer \xff"]
)
def test_who_brings_no_key_is_not_served(model: Path, key: str) -> None:
    async def main() -> None:
        async with serving(model, key=KEY) as rig:
            headers = {b"Authorization": key.encode("latin-1")} if key else {}
            refused = await rig.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert error_of(refused) == (401, "invalid_api_key") and refused.headers["www-authenticate"] == "Bearer"
            assert error_of(await rig.http.get("/v1/models", headers=headers))[0] == 401
            for path in ("/health", "/health/live", "/health/ready"):
                assert (await rig.http.get(path, headers=headers)).status_code == 200
            reply = await rig.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=BEARER)
            assert reply.status_code == 200

    on_loop("selector", main)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b'{"prompt": "a"', "truncated"),
        (b'{"prompt": "a",}', "byte 15"),
        (b'{"prompt": "a"} x', "byte 17"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "truncated"),
    ],
    ids=["empty", "cut", "comma", "more", "not UTF-8", "half a surrogate"],
)
def test_a_body_that_is_no_json_is_told_where(model: Path, content: bytes, words: str) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            reply = await rig.http.post("/v1/completions", content=content, headers=JSON)
            assert error_of(reply) == (400, "malformed_json") and words in reply.json()["error"]["message"]

    on_loop("selector", main)


def test_a_body_of_another_type_is_refused(model: Path) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
                headers = {"Content-Type": kind} if kind else {}
                reply = await rig.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
                assert error_of(reply) == (415, "unsupported_media_type")
            good = {"Content-Type": "Application/JSON; charset=utf-8"}
            reply = await rig.http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=good)
            assert reply.status_code == 200

    on_loop("selector", main)


@pytest.mark.parametrize(
    ("header", "status", "code"),
    [
        ("Content-Encoding: gzip", 415, "unsupported_media_type"),
        ("Content-Encoding: identity", 200, ""),
        ("Content-Type: application/json;x=y; Charset=UTF-16", 415, "unsupported_media_type"),
        ("Content-Type: application/json ; charset=latin1", 415, "unsupported_media_type"),
        ('Content-Type: application/json;charset="UTF-8"', 200, ""),
        ("Transfer-Encoding: gzip, chunked", 501, "unsupported_transfer_encoding"),
        ("Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", 501, "unsupported_transfer_encoding"),
        ("Transfer-Encoding: gzip", 400, "malformed_http"),
        ("Transfer-Encoding: Chunked", 200, ""),
        ("Expect: whatever", 417, "unsupported_expectation"),
        ("Expect: 100-Continue", 200, ""),
    ],
)
def test_what_headers_ask_for_is_had_or_refused_by_name(model: Path, header: str, status: int, code: str) -> None:
    """The message names the header's value; the client reads it though it has sent a body."""

    async def main() -> None:
        async with serving(model) as rig:
            body = b'{"prompt": "a", "max_tokens": 1}'
            lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Connection: close", header]
            if "Content-Type" not in header:
                lines.append("Content-Type: application/json")
            if "Transfer-Encoding" in header:
                body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            else:
                lines.append(f"Content-Length: {len(body)}")
            client = Connection(rig.port)
            await client.send("\r\n".join([*lines, "", ""]).encode() + body)
            got = (await client.rest()).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            head, _, content = got.partition(b"\r\n\r\n")
            assert int(head.split()[1]) == status
            if code:
                error = json.loads(content)["error"]
                assert error["code"] == code
                asked = header.replace('"', "").replace("=", " ").replace(",", " ").split()[-1].lower()
                assert code == "malformed_http" or asked in error["message"]
            client.close()

    on_loop("selector", main)


def body_of(nbytes: int) -> bytes:
    """A request of so many bytes."""
    start, end = b'{"prompt": "a", "max_tokens": 1, "user": "', b'"}'
    return start + b"x" * (nbytes - len(start) - len(end)) + end


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_may_have_so_many_bytes_and_no_more(model: Path, event_loop: str, chunked: bool) -> None:
    """Also far more than the sockets hold; who sends it reads the answer."""

    async def main() -> None:
        async with serving(model, http_max_body_bytes=1000) as rig:
            for nbytes, status in ((999, 200), (1000, 200), (1001, 413), (20_000_000, 413)):
                content = body_of(nbytes)

                async def parts(content: bytes = content) -> Any:
                    for i in range(0, len(content), 100_000):
                        yield content[i : i + 100_000]

                async with httpx.AsyncClient(base_url=rig.http.base_url, timeout=20) as http:
                    sent = parts() if chunked else content
                    reply = await http.post("/v1/completions", content=sent, headers=JSON)
                    assert reply.status_code == status, nbytes
                    if status == 413:
                        assert error_of(reply) == (413, "body_too_large") and "1000" in reply.text
            await rig.at_rest()
            await rig.gone()

    on_loop(event_loop, main)


def test_bodies_have_a_bound_together(model: Path) -> None:
    async def main() -> None:
        async with serving(model, http_max_body_bytes=1000) as rig:
            held = [Connection(rig.port) for _ in range(8)]
            for one in held:
                await one.send(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n")
                await one.send(b"Content-Length: 1000\r\n\r\n" + body_of(1000)[:-1])
            app = rig.server.config.app
            assert isinstance(app, App)
            async with asyncio.timeout(10):
                while app._room.held_nbytes < 8 * 999:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            reply = await rig.http.post("/v1/completions", content=body_of(900), headers=JSON)
            assert error_of(reply) == (503, "overloaded") and reply.headers["retry-after"] == "1"
            for one in held:
                one.close()
            await rig.at_rest()
            assert (await rig.http.post("/v1/completions", content=body_of(900), headers=JSON)).status_code == 200

    on_loop("selector", main)


def test_a_body_that_does_not_come(model: Path, event_loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BODY_S", 0.3)
    monkeypatch.setattr(reading, "LINGER_S", 0.1)

    async def main() -> None:
        async with serving(model) as rig:
            slow = Connection(rig.port)
            head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
            await slow.send(head + b"{")
            got = await slow.rest()
            assert got.startswith(b"HTTP/1.1 408 ") and b"body_timeout" in got and b"connection: close" in got
            slow.close()
            gone = Connection(rig.port)
            await gone.send(head + b"{")
            gone.close()
            await rig.at_rest()
            await rig.gone()

    on_loop(event_loop, main)


def test_while_it_drains_only_health_is_served(model: Path) -> None:
    """And what runs is finished."""

    async def main() -> None:
        async with serving(model) as rig:
            rig.engine.worker.gate.clear()
            running = asyncio.create_task(rig.post(prompt=[5], max_tokens=3))
            await rig.engine.settled(1)
            drained = asyncio.create_task(rig.front.drain())
            await asyncio.sleep(0)
            refused = await rig.post(prompt=[5])
            assert error_of(refused) == (503, "draining") and "retry-after" in refused.headers
            health = await rig.http.get("/health/ready")
            assert (health.status_code, health.json()["phase"]) == (503, "draining")
            assert (await rig.http.get("/health/live")).status_code == 200
            assert not drained.done()
            rig.engine.worker.gate.set()
            assert (await running).status_code == 200
            await drained

    on_loop("selector", main)


def test_the_end_of_the_process_is_told_to_who_waits(model: Path) -> None:
    """Before the first byte as a status, later as an event."""

    async def main() -> None:
        async with serving(model) as rig:
            rig.engine.worker.step_s = 0.01
            stream = Connection(rig.port)
            await stream.post(prompt=[5], max_tokens=4000, stream=True)
            await stream.until(b"data: ")
            whole = asyncio.create_task(rig.post(prompt=[5], max_tokens=4000))
            await rig.engine.settled(2)
            rig.front.end()
            assert error_of(await whole) == (503, "draining")
            got = await stream.until(b"0\r\n\r\n")
            assert b'"code":"draining"' in got and b"[DONE]" not in got
            assert b"the engine is stopping" in got, "not that it finishes what runs"
            stream.close()
            await rig.at_rest()

    on_loop("selector", main)


def test_a_bug_is_a_500_with_the_id_that_the_log_has(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(model) as rig:

            async def broken() -> Any:
                raise ValueError("in /home/somebody/secret.py")

            monkeypatch.setattr(rig.front.engine, "serving", broken)
            reply = await rig.post(prompt=[5])
            assert error_of(reply) == (500, "internal")
            assert "secret" not in reply.text and "Traceback" not in reply.text
            request_id = reply.headers["x-request-id"]
            assert request_id in reply.json()["error"]["message"] and request_id in caplog.text

    on_loop("selector", main)


def test_requests_have_ids_of_their_own(model: Path) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            replies = [await rig.http.get("/v1/models") for _ in range(3)]
            assert len({reply.headers["x-request-id"] for reply in replies}) == 3

    on_loop("selector", main)


def test_one_connection_takes_many_requests(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            one = Connection(rig.port)
            for count in (1, 2, 3):
                await one.post(prompt=[5], max_tokens=count)
                got = await one.until(b"text_completion")
                assert json.loads(got.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == count
            await one.post(prompt=[5], max_tokens=2, stream=True)
            await one.until(b"0\r\n\r\n")
            await one.post(prompt=[5], max_tokens=2)
            assert b"200 OK" in await one.until(b"text_completion")
            one.close()
            await rig.gone()

    on_loop(event_loop, main)
