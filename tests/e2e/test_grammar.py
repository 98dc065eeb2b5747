"""Structured answers of a running engine, whose model knows nothing: what comes must be of the schema all the same."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.e2e.engine import command, running

COMPACT = {"whitespace_flexible": False}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "<|im_end|>"]}, "minItems": 1, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
    "x-guidance": COMPACT,
}
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": -99, "maximum": 99},
    "minItems": 2,
    "maxItems": 5,
    "x-guidance": COMPACT,
}
TEXT = {"type": "string", "maxLength": 20, "x-guidance": COMPACT}
PROMPT = list(range(300, 340))


def is_person(value: Any) -> bool:
    """By the words of the schema."""
    return (
        list(value) == ["name", "age", "tags", "more"]
        and 2 <= len(value["name"]) <= 6
        and value["name"].isascii()
        and value["name"].istitle()
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"red", "green", "<|im_end|>"}
        and value["more"] in (None, True, False)
    )


def is_numbers(value: Any) -> bool:
    """By the words of the schema."""
    return 2 <= len(value) <= 5 and all(type(number) is int and abs(number) < 100 for number in value)


def is_text(value: Any) -> bool:
    """By the words of the schema."""
    return isinstance(value, str) and len(value) <= 20


WARM = {"temperature": 1.0, "seed": 7, "n": 3}
CHANGED = {"temperature": 1.5, "seed": 3, "frequency_penalty": 1.0, "logit_bias": {93: 5.0}, "top_k": 30}
ASKED: list[tuple[dict[str, Any], Callable[[Any], bool], dict[str, Any]]] = [
    (PERSON, is_person, WARM),
    (NUMBERS, is_numbers, {}),
    (TEXT, is_text, CHANGED),
]


async def plain(client: Client, seed: int) -> list[int]:
    """Of a request without a grammar; the first is greedy."""
    sampling = Sampling(temperature=min(seed, 1), seed=seed, max_tokens=30, ignore_eos=True)
    stream = client.generate(token_ids=[*PROMPT, seed], sampling=sampling)
    return [token async for piece in stream for token in piece.token_ids]


async def held(client: Client, schema: dict[str, Any], **settings: Any) -> list[Any]:
    """The values of all answers, each of which ended by itself."""
    sampling = Sampling(grammar=f"start: %json {json.dumps(schema)}", max_tokens=150, **settings)
    answer = client.generate(token_ids=PROMPT, sampling=sampling)
    texts = await answer.texts()
    assert answer.finished and answer.finished.reason == "stop", texts
    return [json.loads(text) for text in texts]


def test_answers_are_of_their_schemas_however_they_are_drawn_and_preempted() -> None:
    """Greedy and drawn, three at a time, penalised, with so little KV that requests are preempted. In float32 the plain
    requests beside them answer as alone, and so do the held ones."""

    async def session(client: Client) -> None:
        alone = [await held(client, schema, **settings) for schema, _, settings in ASKED]
        plain_alone = [await plain(client, seed) for seed in range(2)]
        together = await asyncio.gather(
            *(held(client, schema, **settings) for schema, _, settings in ASKED),
            *(plain(client, seed) for seed in range(2)),
        )
        assert together == [*alone, *plain_alone]
        for (_, fits, _), values in zip(ASKED, alone, strict=True):
            assert all(map(fits, values)), values
        assert len({json.dumps(value) for values in alone for value in values}) > 3
        assert (await client.stats()).preempted > 0

    with running("--dtype", "float32", "--slots", "128", "--demand-tokens", "64", "--kv-tokens", "208") as engine:
        engine.over(session)
        flags = ["--endpoint", engine.endpoint, "--temperature", "1", "--json-schema", json.dumps(NUMBERS)]
        done = command("scheduler.client", "Some numbers:", *flags)
        assert done.returncode == 0 and is_numbers(json.loads(done.stdout.split("\n")[0])), done
        refused = command("scheduler.client", "a", *flags[:2], "--json-schema", '{"type": "nothing"}')
        assert refused.returncode == 1 and refused.stderr.startswith("error: invalid_grammar: "), refused
