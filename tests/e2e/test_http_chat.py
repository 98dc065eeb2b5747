"""Chats as a user has them: a running engine seen by the openai client. The model's weights are random, so that answers
of a form come of their grammars alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from copyengine.checkpoint.random_model import Sizes, write_random_model
from scheduler.client import Client
from scheduler.protocol import Message, Sampling
from scheduler.tokenize import MARKERS
from tests.conftest import MadeOnce
from tests.e2e.engine import Engine, running
from tests.scheduler.chat_templates import JSON_CALLS, XML_CALLS
from tests.scheduler.http.chats import added_up

TEMPLATES = {"json": JSON_CALLS, "xml": XML_CALLS}
SIZES = Sizes(layers=2, hidden=64, intermediate=32, experts=8, experts_per_token=2, heads=4, kv_heads=2, head_dim=16,
              vocab_size=1700, max_position=2048)  # fmt: skip
"""The tokenizer has some 1,600 tokens: there is room for the markers."""

QUIET: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
USER: Any = {"role": "user", "content": "Once upon a time"}


class Weather(BaseModel):
    """What the answers are asked to be."""

    kind: Literal["rain", "sun"]
    degrees: int = Field(ge=-50, le=50)


SCHEMA = {**Weather.model_json_schema(), "additionalProperties": False}


def tool(name: str, strict: bool) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": strict}}


TOOLS = [tool("now", strict=False), tool("soon", strict=True)]


def write_model(directory: Path, template: str) -> None:
    write_random_model(directory, SIZES, dtype="float32")
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens(list(MARKERS))
    assert tokenizer.get_vocab_size() <= SIZES.vocab_size
    tokenizer.save(str(path))
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(settings | {"chat_template": template}), "utf-8")


@pytest.fixture(scope="module", params=TEMPLATES)
def engine(request: pytest.FixtureRequest, made_once: MadeOnce) -> Iterator[Engine]:
    template = TEMPLATES[request.param]
    directory = made_once(f"chat_model_{request.param}", lambda path: write_model(path, template))
    with running("--model", str(directory), "--http-port", "0", "--served-model-name", "m") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.fact("HTTP"), api_key="any", max_retries=0, timeout=60) as client:
        yield client


def chat(client: openai.OpenAI, **request: Any) -> tuple[Any, str]:
    """The message and why it ended; the same as it adds up from a stream, ids aside."""
    asked: Any = {"model": "m", "messages": [USER], "temperature": 0, "max_tokens": 400} | request
    (choice,) = client.chat.completions.create(**asked).choices
    events = client.chat.completions.create(stream=True, **asked)
    streamed = added_up([one.model_dump(exclude_unset=True) for event in events for one in event.choices])
    whole = choice.model_dump(exclude_unset=True)
    for call in [*streamed["message"].get("tool_calls", []), *whole["message"].get("tool_calls", [])]:
        assert call.pop("id").startswith("call_")
    assert streamed == whole
    return choice.message, choice.finish_reason


def test_a_greedy_chat_is_that_of_the_zmq_client(engine: Engine, client: openai.OpenAI) -> None:
    texts = []

    async def session(zmq: Client) -> None:
        sampling = Sampling(max_tokens=24)
        texts.append(await zmq.generate(messages=[Message("user", USER["content"])], sampling=sampling).text())

    engine.over(session)
    message, reason = chat(client, max_tokens=24)
    reasoning = getattr(message, "reasoning_content", "")
    assert reasoning + (message.content or "") == texts[0] and reason == "length" and message.role == "assistant"


def test_json_by_a_schema_is_what_is_asked_for(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    message, reason = chat(client, response_format=wanted, extra_body=QUIET)
    assert reason == "stop"
    Weather.model_validate_json(message.content)
    parsed = client.chat.completions.parse(
        model="m", messages=[USER], response_format=Weather, max_tokens=400, seed=1, extra_body=QUIET
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    message, reason = chat(client, response_format={"type": "json_object"}, max_tokens=16, extra_body=QUIET)
    assert message.content.startswith("{") and (reason == "length" or isinstance(json.loads(message.content), dict))


def test_thinking_comes_before_what_is_bound(engine: Engine, client: openai.OpenAI) -> None:
    """Of a model that is made to think, and to stop it at once: its markers are tokens that a grammar has to name."""
    url = engine.fact("HTTP").removesuffix("/v1") + "/tokenize"
    begin, end = (httpx.post(url, json={"prompt": marker}).json()["tokens"] for marker in ("<think>", "</think>"))
    bias = {str(begin[0]): 50, str(end[0]): 100}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    events = list(
        client.chat.completions.create(
            model="m", messages=[USER], response_format=wanted, logit_bias=bias, logprobs=True, stream=True,
            temperature=0, max_tokens=400,
        )
    )  # fmt: skip
    choice = added_up([one.model_dump(exclude_unset=True) for event in events for one in event.choices])
    drawn = [place["token"] for place in choice["logprobs"]["content"]]
    assert "</think>" in drawn[:2] and "".join(drawn).count("think>") <= 2
    Weather.model_validate_json(choice["message"]["content"])


def test_calls_that_must_be_have_arguments_that_validate(client: openai.OpenAI) -> None:
    """And their results go back to the model."""
    named: Any = {"type": "function", "function": {"name": "soon"}}
    for choice in ("required", named):
        message, reason = chat(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, extra_body=QUIET)
        assert reason == "tool_calls" and not message.content
        (call,) = message.tool_calls
        assert call.function.name in (("soon",) if choice == named else ("now", "soon"))
        Weather.model_validate_json(call.function.arguments)
        turns = [USER, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "fine"}]
        chat(client, messages=turns, tools=TOOLS, max_tokens=8)


def test_what_a_grammar_cannot_hold_is_refused_with_its_reason(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="not") as refused:
        client.chat.completions.create(model="m", messages=[USER], response_format=wanted)
    assert refused.value.code == "invalid_grammar"
