"""What clients ask of the draw, over real sockets: against what the worker was sent and what it answered."""

import asyncio
from array import array
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from copyengine.wire.errors import RequestRefused
from scheduler.protocol import Sampling
from tests.scheduler.rig import engine, expected, on_loop

PROMPT = [40, 41, 40, 50]


def test_each_step_counts_the_answer_so_far(model: Path) -> None:
    """Against collections.Counter; a step that draws nothing says nothing."""

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            penalised = Sampling(max_tokens=500, ignore_eos=True, repetition_penalty=1.5, logit_bias={7: -3.0})
            tokens = [
                t async for piece in client.generate(token_ids=PROMPT, sampling=penalised) for t in piece.token_ids
            ]
            assert len(set(tokens)) < len(tokens) == 500
            for i, step in enumerate(rig.worker.steps):
                sample = step.sequences[0].sample
                assert sample and sample.changes and sample.changes.bias == {7: -3.0}
                counts = dict(zip(array("i", sample.changes.seen), array("i", sample.changes.counts), strict=True))
                assert counts == dict.fromkeys(PROMPT, 0) | Counter(tokens[:i])

    on_loop("selector", main)


@pytest.mark.parametrize("count", [0, 2])
def test_each_token_comes_with_its_log_probabilities(model: Path, count: int) -> None:
    """Against the made-up worker's rule and the tokenizer; the token that ends the answer has them too."""

    async def main() -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        async with engine(model) as rig, rig.client() as client:
            end = expected(PROMPT, 6, rig.service.vocab_size)[-1]
            sampling = Sampling(stop_token_ids=[end], ignore_eos=True, logprobs=count)
            pieces = [piece async for piece in client.generate(token_ids=PROMPT, sampling=sampling)]
            tokens = [token for piece in pieces for token in piece.token_ids]
            assert tokens[-1] == end
            told = [told for piece in pieces for told in piece.logprobs or []]
            assert [t.drawn.token_id for t in told] == tokens
            assert [t.drawn.logprob for t in told] == [-token / 8 for token in tokens]
            for entry in [entry for t in told for entry in (t.drawn, *t.top)]:
                assert entry.text == tokenizer.decode([entry.token_id], skip_special_tokens=False)
            assert {tuple((e.token_id, e.logprob) for e in t.top) for t in told} == {((3, -1.5), (4, -2.0))[:count]}
            plain = client.generate(token_ids=PROMPT, sampling=Sampling(max_tokens=2))
            assert {piece.logprobs is None async for piece in plain} == {True}

    on_loop("selector", main)


@pytest.mark.parametrize("after", [1, 3])
def test_logits_that_are_not_finite_end_their_request_alone(model: Path, after: int) -> None:
    """In its prompt and in its answer; the requests beside it get what they get alone, and nothing of it is reused."""

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.step_s = 0.01
            prompt = list(range(100, 140))
            vocab_size = rig.service.vocab_size
            rig.worker.bad = {[prompt[-1], *expected(prompt, 3, vocab_size)][after - 1]}

            async def answer(ids: list[int]) -> list[int]:
                stream = client.generate(token_ids=ids, sampling=Sampling(max_tokens=12, ignore_eos=True))
                return [token async for piece in stream for token in piece.token_ids]

            others = [[7, 8, 200], [7, 8, 300]]
            *good, bad = await asyncio.gather(*(answer(ids) for ids in [*others, prompt]), return_exceptions=True)
            assert isinstance(bad, RequestRefused) and bad.code == "bad_logits"
            assert good == [expected(ids, 12, vocab_size) for ids in others]
            stats = await client.stats()
            assert (stats.failed, stats.finished) == (1, 2)
            if after == 1:
                assert stats.kv_pages_cached == 0, "neither the others' few tokens fill a page"
            rig.worker.bad.clear()
            assert await answer(prompt) == expected(prompt, 12, vocab_size)

    on_loop("selector", main)


def test_a_preempted_request_keeps_its_counts(model: Path) -> None:
    """Two answers that fit into 6 pages one by one, but not together: each step that draws a token counts the answer
    before it; one that takes a known token again, after the preemption, counts nothing."""

    async def main() -> None:
        async with engine(model, facts={"kv_tokens": 96}) as rig, rig.client() as client:
            prompts = {20: [9, 20], 30: [9, 30]}

            async def answer(ids: list[int]) -> list[int]:
                sampling = Sampling(max_tokens=80, ignore_eos=True, frequency_penalty=0.5)
                return [t async for p in client.generate(token_ids=ids, sampling=sampling) for t in p.token_ids]

            answers = dict(zip(prompts, await asyncio.gather(*map(answer, prompts.values())), strict=True))
            assert (await client.stats()).preempted > 0
            whose = {s.sequence: s.tokens[1] for step in rig.worker.steps for s in step.sequences if s.tokens[0] == 9}
            steps = [s for step in rig.worker.steps for s in step.sequences if s.sample and s.sample.changes]
            assert len(steps) == 2 * 80
            for sequence in steps:
                assert sequence.sample and sequence.sample.changes
                told = sequence.sample.changes
                counts = dict(zip(array("i", told.seen), array("i", told.counts), strict=True))
                before = sequence.start + len(sequence.tokens) - 2
                assert counts == Counter(answers[whose[sequence.sequence]][:before])

    on_loop("selector", main)
