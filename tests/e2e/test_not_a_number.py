"""A checkpoint of which single experts are not numbers, against the same without that.

Which prompts are routed there is found out by a third checkpoint, whose same experts are only other ones: what it
answers otherwise than the sound one was routed there, and nothing else was.
"""

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from copyengine.checkpoint.random_model import write_random_model
from scheduler.client import Client, RequestRefused
from scheduler.protocol import Sampling
from tests.e2e.crowd import AND_CUDA, SMALL, engine_on, prompt_of, settled
from tests.e2e.engine import Engine

SIZES = replace(SMALL, layers=4, experts=64, max_position=1024)
SPOILT = {
    "model.layers.1.mlp.experts.5.down_proj.weight": np.nan,
    "model.layers.2.mlp.experts.9.up_proj.weight": np.inf,
}
"""Neither is of the last layer, where a token that is none of the last leaves no trace in the answer."""

LONG = [prompt_of(number, 300) for number in range(33, 41)]
BEGINNINGS = [prompt[:17] for prompt in LONG]
PROMPTS = [
    *(prompt_of(number, 3 + number % 9) for number in range(24)),
    *(prompt_of(number, 70) for number in (31, 32)),
    *BEGINNINGS,
]
"""Of some one page of KV is full, whatever they begin with."""
NEW_TOKENS = 6
ENOUGH = 5
"""Prompts that are routed there, and that are not, at least."""


class Answer(NamedTuple):
    """What came of a prompt: its tokens with their log-probabilities, or the code of its end."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    code: str


def write(directory: Path, spoil: bool = False, other: bool = False) -> Path:
    write_random_model(directory, SIZES, dtype="float32")
    shard = next(directory.glob("*.safetensors"))
    tensors = load_file(shard)
    for name, bad in SPOILT.items():
        if spoil:
            tensors[name][3, 7] = bad
        if other:
            tensors[name] = -tensors[name]
    save_file(tensors, shard, {"format": "pt"})
    return directory


async def answer(client: Client, prompt: list[int]) -> Answer:
    asked = client.generate(token_ids=prompt, sampling=Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0))
    tokens: list[int] = []
    logprobs: list[float] = []
    try:
        async for piece in asked:
            tokens += piece.token_ids
            logprobs += [place.drawn.logprob for place in piece.logprobs or ()]
    except RequestRefused as failed:
        return Answer((), (), failed.code)
    return Answer(tuple(tokens), tuple(logprobs), "")


def answers(engine: Engine, prompts: list[list[int]], at_once: int) -> list[Answer]:
    """In order; so many at a time."""

    async def main() -> list[Answer]:
        room = asyncio.Semaphore(at_once)
        async with Client(engine.endpoint) as client:

            async def one(prompt: list[int]) -> Answer:
                async with room:
                    return await answer(client, prompt)

            return await asyncio.gather(*map(one, prompts))

    return asyncio.run(main())


FLAGS = ("--slots", "64", "--chunked-prefill-size", "64", "--demand-tokens", "48", "--max-running-requests", "8")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What the prompts are answered with where all is well."""
    with engine_on("uvloop", write(tmp_path_factory.mktemp("sound")), *FLAGS) as engine:
        return answers(engine, PROMPTS, 1)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory, sound: list[Answer]) -> list[bool]:
    """Which of the prompts are, they or their answers, routed to an expert of SPOILT."""
    with engine_on("uvloop", write(tmp_path_factory.mktemp("other"), other=True), *FLAGS) as engine:
        others = answers(engine, PROMPTS, 1)
    return [there != here for there, here in zip(others, sound, strict=True)]


@pytest.fixture(scope="module", params=AND_CUDA)
def spoilt(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine_on(request.param, write(tmp_path_factory.mktemp("spoilt"), spoil=True), *FLAGS) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.timeout(400)  # with the starts of three engines
def test_who_is_routed_to_what_is_no_number_ends_with_an_error_and_nobody_else(
    spoilt: Engine, sound: list[Answer], routed: list[bool]
) -> None:
    """Eight at a time, in chunks of several prompts and of one, on demand and streamed, three times over: pages that a
    failed request had are others' in the next round, and its prefix is asked for again."""
    expected = [Answer((), (), "bad_logits") if bad else there for there, bad in zip(sound, routed, strict=True)]
    failed = 3 * sum(routed)
    assert 3 * ENOUGH <= failed <= 3 * (len(PROMPTS) - ENOUGH)
    before = spoilt.stats()
    for shift in (0, 5, 11):
        asked = [*range(shift, len(PROMPTS)), *range(shift)]
        got = answers(spoilt, [PROMPTS[i] for i in asked], 8)
        assert [one.code for one in got] == [expected[i].code for i in asked]
        assert [one.tokens for one in got] == [expected[i].tokens for i in asked]
    after = settled(spoilt)
    assert (after.failed - before.failed, after.finished - before.finished) == (failed, 3 * len(PROMPTS) - failed)
    assert after.not_finite - before.not_finite == failed
    page = urllib.request.urlopen(f"{spoilt.url}/metrics", timeout=10).read().decode()
    assert re.search(rf'slotstream:requests_not_finite_total{{model_name=".*"}} {float(after.not_finite)}\n', page)


@pytest.mark.slow
def test_a_prompt_fails_with_its_first_bad_chunk_and_leaves_nothing_that_others_would_read(
    spoilt: Engine, sound: list[Answer], routed: list[bool]
) -> None:
    """Some long ones, each before a short one that it begins with, and that nothing is wrong with."""
    good = [i for i, bad in enumerate(routed) if PROMPTS[i] in BEGINNINGS and not bad]
    assert len(good) >= 2
    for i in good:
        long = LONG[BEGINNINGS.index(PROMPTS[i])]
        before = spoilt.stats()
        assert answers(spoilt, [long], 1) == [Answer((), (), "bad_logits")]
        after = settled(spoilt)
        chunks = after.demand.steps + after.streamed.steps - before.demand.steps - before.streamed.steps
        assert 1 <= chunks < len(long) // 64, "what is behind the bad chunk is not computed"
        assert [one.tokens for one in answers(spoilt, [PROMPTS[i]] * 2, 2)] == [sound[i].tokens] * 2
