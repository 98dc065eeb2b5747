"""HTTP as a user has it: the openai client and sockets against launch.py, on uvloop and in Windows' conditions.

What is answered is checked against the ZMQ client's answers, what is left behind against the engine's own counters and
the system's list of the front's connections.
"""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.e2e.engine import Engine, running

FLAGS = ("--slots", "64", "--chunked-prefill-size", "256", "--http-port", "0")
PROMPT = "Once upon a time"
ENDLESS = 7000
"""Tokens of an answer that takes far longer than a test."""


@contextlib.contextmanager
def openai_client(engine: Engine, api_key: str = "any") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key=api_key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai_client(engine) as client:
        yield client


def model_of(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


def by_zmq(engine: Engine, **request: Any) -> str:
    """The same over the ZMQ client."""
    texts = []

    async def session(client: Client) -> None:
        texts.append(await client.generate(**request).text())

    engine.over(session)
    return texts[0]


def wait(met: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def at_rest(engine: Engine) -> bool:
    """Nothing runs, every page is free or cached, and the front has no connection but that to the scheduler."""
    stats = engine.stats()
    free = stats.kv_pages_free + stats.kv_pages_cached == stats.kv_pages_total
    port = int(engine.url.rsplit(":", 1)[1])
    clients = [c for c in engine.child("http").net_connections("tcp") if c.laddr.port == port and c.raddr]
    return stats.running == stats.waiting == 0 and free and not clients


def test_completions_are_those_of_the_zmq_client(engine: Engine, client: openai.OpenAI) -> None:
    """Of a text and of token ids, greedy and drawn, whole and streamed."""
    model = model_of(client)
    ids = httpx.post(f"{engine.url}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    for sampling in (Sampling(max_tokens=6), Sampling(max_tokens=6, temperature=0.8, seed=7, top_p=0.9)):
        expected = by_zmq(engine, prompt=PROMPT, sampling=sampling)
        asked: dict[str, Any] = {
            "model": model,
            "max_tokens": 6,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "top_p": sampling.top_p,
        }
        for prompt in (PROMPT, ids):
            whole = client.completions.create(prompt=prompt, **asked)
            assert whole.choices[0].text == expected and whole.choices[0].finish_reason == "length"
            assert whole.usage and whole.usage.completion_tokens == 6 and whole.usage.prompt_tokens == len(ids)
        asked["stream_options"] = {"include_usage": True}
        events = list(client.completions.create(prompt=PROMPT, stream=True, **asked))
        assert "".join(choice.text for event in events for choice in event.choices) == expected
        assert [choice.finish_reason for event in events for choice in event.choices][-1] == "length"
        assert events[-1].choices == [] and events[-1].usage and events[-1].usage.completion_tokens == 6


def test_several_answers_and_what_vllms_users_send(engine: Engine, client: openai.OpenAI) -> None:
    model = model_of(client)
    several = client.completions.create(
        model=model, prompt=[PROMPT, "The"], n=2, seed=3, max_tokens=8, logprobs=3, stop=["zzz"]
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    one = by_zmq(engine, prompt="The", sampling=Sampling(max_tokens=8, temperature=1.0, seed=4))
    assert several.choices[3].text == one
    logprobs = several.choices[0].logprobs
    assert logprobs and logprobs.tokens and len(logprobs.tokens) == 8
    extras = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [9]}
    answer = client.completions.create(model=model, prompt=PROMPT, seed=1, max_tokens=8, extra_body=extras)
    sampling = Sampling(temperature=1.0, seed=1, max_tokens=8, **extras)  # type: ignore[arg-type]
    assert answer.choices[0].text == by_zmq(engine, prompt=PROMPT, sampling=sampling)


def test_errors_are_the_openai_clients_exceptions(engine: Engine, client: openai.OpenAI) -> None:
    model = model_of(client)
    with pytest.raises(openai.NotFoundError, match="nope") as not_found:
        client.completions.create(model="nope", prompt="x")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="99999 do not fit into the 8192") as too_long:
        client.completions.create(model=model, prompt="x", max_tokens=99999, stream=True)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="frobnicate") as unknown:
        client.completions.create(model=model, prompt="x", extra_body={"frobnicate": 1})
    assert unknown.value.param == "frobnicate"


def request_of(engine: Engine, **body: Any) -> bytes:
    content = msgspec.json.encode(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def connect(engine: Engine) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(engine.url.rsplit(":", 1)[1])), timeout=20)


ASKED: dict[str, dict[str, Any]] = {
    "before the first byte": {"prompt": PROMPT, "stream": True},
    "in the middle of a stream": {"prompt": PROMPT, "stream": True},
    "in the middle of prefill": {"prompt": [7] * 2500, "max_tokens": 60},
    "not streamed": {"prompt": PROMPT, "n": 2},
    "half closed": {"prompt": PROMPT, "stream": True},
    "does not read": {"prompt": PROMPT, "stream": True, "logprobs": 5},
}


@pytest.mark.parametrize("how", ASKED)
def test_the_engine_stops_when_the_client_leaves(engine: Engine, how: str) -> None:
    before = engine.stats()
    with connect(engine) as connection:
        connection.sendall(request_of(engine, **{"max_tokens": ENDLESS, "ignore_eos": True} | ASKED[how]))
        if how != "before the first byte":
            wait(lambda: engine.stats().running > 0)
        if how in ("in the middle of a stream", "half closed"):
            while b"data: " not in connection.recv(65536):
                pass
        if how == "half closed":
            connection.shutdown(socket.SHUT_WR)
            wait(lambda: engine.stats().running == 0)
        if how == "does not read":
            time.sleep(0.5)
    wait(lambda: at_rest(engine))
    after = engine.stats()
    assert after.finished == before.finished and after.failed == before.failed
    assert after.aborted - before.aborted == 1 or (how == "before the first byte" and after.aborted == before.aborted)
    assert after.generated_tokens - before.generated_tokens < ENDLESS / 2


def test_who_reads_slowly_holds_nobody_up(engine: Engine, client: openai.OpenAI) -> None:
    """A byte at a time, with the smallest buffer there is."""
    model = model_of(client)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        slow.connect(("127.0.0.1", int(engine.url.rsplit(":", 1)[1])))
        slow.sendall(request_of(engine, prompt=PROMPT, stream=True, max_tokens=ENDLESS, logprobs=5))
        expected = by_zmq(engine, prompt="The", sampling=Sampling(max_tokens=8))
        for _ in range(2):
            assert slow.recv(1)
            answer = client.completions.create(model=model, prompt="The", max_tokens=8, temperature=0)
            assert answer.choices[0].text == expected
    client.close()
    wait(lambda: at_rest(engine))


def health(url: str) -> httpx.Response:
    """Not ready, whatever it is that keeps it from being so, is 503."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health/ready", timeout=10)
    return httpx.Response(503, json={"phase": "no front"})


def test_front_and_scheduler_die_and_come_back(tmp_path: Path) -> None:
    """Each where it was; requests of the other go on. Then a drain: what runs over HTTP is finished.

    The key is in a file.
    """
    (tmp_path / "key").write_text("a-key\n", "utf-8")
    with running(*FLAGS, "--api-key", f"@{tmp_path / 'key'}") as engine, openai_client(engine, "a-key") as client:
        url, model = engine.url, model_of(client)
        with openai_client(engine, "other") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()

        def complete() -> str:
            return client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0).choices[0].text

        before = complete()

        async def session(zmq_client: Client) -> None:
            answer = zmq_client.generate(prompt=PROMPT, sampling=Sampling(max_tokens=60, ignore_eos=True))
            pieces = 0
            async for _ in answer:
                pieces += 1
                if pieces == 1:
                    engine.child("http").kill()
            assert answer.finished and answer.finished.reason == "length"

        ran = {name: engine.child(name) for name in ("scheduler", "worker0")}
        engine.over(session)
        engine.wait_serving_again(1)
        wait(lambda: health(url).status_code == 200)
        assert complete() == before and {name: engine.child(name) for name in ran} == ran

        front = engine.child("http")
        stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=ENDLESS, stream=True)
        next(iter(stream))
        engine.child("scheduler").kill()
        with pytest.raises(openai.APIError, match="engine is gone"):
            list(stream)
        try:
            assert complete() == before, "it may be back by now"
        except openai.InternalServerError as unavailable:
            assert unavailable.status_code == 503
        engine.wait_serving_again(2)
        wait(lambda: health(url).status_code == 200)
        assert complete() == before and engine.child("http") == front

        drained(engine, client, model)
        assert "Traceback" not in engine.text()


def drained(engine: Engine, client: openai.OpenAI, model: str) -> None:
    """SIGTERM: what runs is finished, new requests are refused, both end well."""
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=80, stream=True, extra_body={"ignore_eos": True}
    )
    events = iter(stream)
    next(events)
    code: list[int] = []
    stopping = threading.Thread(target=lambda: code.append(engine.stop(signal.SIGTERM)))
    stopping.start()
    engine.wait_for(lambda: any("finishing running requests" in line for line in engine.errors))
    wait(lambda: health(engine.url).json()["phase"] == "draining")
    with openai_client(engine, "a-key") as late, pytest.raises(openai.InternalServerError) as refused:
        late.completions.create(model=model, prompt=PROMPT)
    assert (refused.value.status_code, refused.value.code) == (503, "draining")
    assert [choice.finish_reason for event in events for choice in event.choices][-1] == "length"
    stopping.join(30)
    assert code == [0], engine.text()
