"""HTTP as a user has it: launch.py --http-port, seen by the openai client and, where that is too polite, by sockets."""

import signal
from collections.abc import Iterator

import httpx
import openai
import pytest

from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.e2e.engine import Engine, running

FLAGS = ("--slots", "64", "--chunked-prefill-size", "256", "--http-port", "0")
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(*FLAGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.fact("HTTP"), api_key="any", max_retries=0, timeout=30) as client:
        yield client


def model_of(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


def greedy_by_zmq(engine: Engine, prompt: str, max_tokens: int) -> str:
    """The same over the ZMQ client."""
    texts = []

    async def session(client: Client) -> None:
        texts.append(await client.generate(prompt=prompt, sampling=Sampling(max_tokens=max_tokens)).text())

    engine.over(session)
    return texts[0]


def test_a_greedy_completion_is_that_of_the_zmq_client(engine: Engine, client: openai.OpenAI) -> None:
    expected = greedy_by_zmq(engine, PROMPT, 24)
    whole = client.completions.create(model=model_of(client), prompt=PROMPT, max_tokens=24, temperature=0)
    assert whole.choices[0].text == expected and whole.choices[0].finish_reason == "length"
    assert whole.usage and whole.usage.completion_tokens == 24
    events = list(
        client.completions.create(
            model=model_of(client),
            prompt=PROMPT,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(choice.text for event in events for choice in event.choices) == expected
    assert [choice.finish_reason for event in events for choice in event.choices][-1] == "length"
    assert events[-1].choices == [] and events[-1].usage and events[-1].usage.completion_tokens == 24


def test_errors_are_the_openai_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope") as not_found:
        client.completions.create(model="nope", prompt="x")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="99999") as too_long:
        client.completions.create(model=model_of(client), prompt="x", max_tokens=99999)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="frobnicate"):
        client.completions.create(model=model_of(client), prompt="x", extra_body={"frobnicate": 1})


def test_health_and_drain() -> None:
    with running(*FLAGS) as engine:
        base = engine.fact("HTTP").removesuffix("/v1")
        assert httpx.get(f"{base}/health/ready").json()["ready"]
        assert httpx.get(f"{base}/health/live").status_code == 200
        assert engine.stop(signal.SIGTERM) == 0
        assert "Traceback" not in engine.text()
