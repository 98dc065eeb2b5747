"""Answers that a grammar holds, over real sockets: against what the made-up worker was sent, and by the core alone."""

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from copyengine.wire.errors import RequestRefused
from scheduler.core import Core, CoreLimits
from scheduler.detokenize import NoText
from scheduler.protocol import Failed, Finished, Sampling, Tokens
from scheduler.request import Ending, Request
from tests.scheduler.rig import engine, expected, on_loop
from worker.protocol import Changes, ExpertStats, RunStep, SequenceStep, StepDone
from worker.protocol import Sampling as StepSampling

PROMPT = [40, 41, 50]
OBJECT = 'start: %json {"type": "object", "properties": {"a": {"enum": ["fox", "café"]}, "b": {"const": "日本"}},'
OBJECT += ' "required": ["a", "b"], "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}'


def masks(steps: list[RunStep]) -> dict[int, bytes]:
    """Of each position that a token is drawn for, if a grammar holds it."""
    told: dict[int, bytes] = {}
    for sequence in (sequence for step in steps for sequence in step.sequences):
        if sequence.sample and sequence.sample.changes and sequence.sample.changes.allowed:
            assert sequence.start + len(sequence.tokens) not in told
            told[sequence.start + len(sequence.tokens)] = sequence.sample.changes.allowed
    return told


def test_each_token_is_drawn_with_its_mask_and_the_answer_ends_by_itself(model: Path) -> None:
    """The worker's own choice is out of the grammar nearly always; what comes is of the schema."""

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            penalised = Sampling(grammar=OBJECT, repetition_penalty=1.5)
            stream = client.generate(token_ids=PROMPT, sampling=penalised)
            tokens = [token async for piece in stream for token in piece.token_ids]
            assert stream.finished and stream.finished.reason == "stop"
            text = Tokenizer.from_file(str(model / "tokenizer.json")).decode(tokens, skip_special_tokens=False)
            assert json.loads(text) in ({"a": "fox", "b": "日本"}, {"a": "café", "b": "日本"})
            told = masks(rig.worker.steps)
            assert sorted(told) == list(range(len(PROMPT), len(PROMPT) + len(tokens))), "no step for the end"
            for token, mask in zip(tokens, told.values(), strict=True):
                assert len(mask) == -(-rig.service.vocab_size // 32) * 4
                assert int.from_bytes(mask, "little") >> token & 1
            steps = [s.sample for step in rig.worker.steps for s in step.sequences if s.sample]
            assert all(s.changes and s.changes.repetition == 1.5 and len(s.changes.seen) >= 8 for s in steps)

    on_loop("selector", main)


def test_a_preempted_answer_goes_on_where_it_was(model: Path) -> None:
    """Two answers that fit into 6 pages one by one, but not together: a token that is taken again has no mask, each new
    one has one, and the answers are those to one request at a time."""

    async def main() -> None:
        async with engine(model, facts={"kv_tokens": 96}) as rig, rig.client() as client:

            async def answer(last: int) -> str:
                held = Sampling(max_tokens=80, grammar='start: (/[0-4]/ ","){38}')
                return await client.generate(token_ids=[9, last], sampling=held).text()

            alone = [await answer(20), await answer(30)]
            rig.worker.steps.clear()
            assert list(await asyncio.gather(answer(20), answer(30))) == alone
            assert (await client.stats()).preempted > 0
            replayed = [
                sequence
                for step in rig.worker.steps
                if step.mode == "decode"
                for sequence in step.sequences
                if sequence.sample == StepSampling()
            ]
            assert replayed
            for number in {sequence.sequence for step in rig.worker.steps for sequence in step.sequences}:
                steps = [RunStep(s.mode, [p for p in s.sequences if p.sequence == number]) for s in rig.worker.steps]
                told = masks([step for step in steps if step.sequences])
                assert sorted(told) == list(range(2, 2 + len(told)))

    on_loop("selector", main)


def test_several_answers_each_have_a_matcher(model: Path) -> None:
    """Beside a plain request, which gets what it gets alone."""

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            plain = client.generate(token_ids=PROMPT, sampling=Sampling(max_tokens=20, ignore_eos=True))
            held = client.generate(token_ids=PROMPT, sampling=Sampling(grammar=OBJECT, n=3))

            async def tokens_of_plain() -> list[int]:
                return [token async for piece in plain for token in piece.token_ids]

            tokens, texts = await asyncio.gather(tokens_of_plain(), held.texts())
            assert tokens == expected(PROMPT, 20, rig.service.vocab_size)
            assert len(texts) == 3 and all(json.loads(text)["b"] == "日本" for text in texts)
            assert held.finished and {choice.reason for choice in held.finished.choices} == {"stop"}

    on_loop("selector", main)


def test_an_answer_that_is_cut_ends_by_length(model: Path) -> None:
    """By max_tokens before the end; one whose last token is the grammar's last too ends by itself."""

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            reasons = {}
            for count in (2, 3, 4):
                stream = client.generate(
                    token_ids=PROMPT, sampling=Sampling(max_tokens=count, grammar='start: "[" /[0-9]/ "]"')
                )
                text = await stream.text()
                assert stream.finished
                reasons[count] = (len(text), stream.finished.reason)
            assert reasons == {2: (2, "length"), 3: (3, "stop"), 4: (3, "stop")}

    on_loop("selector", main)


def test_what_is_refused_is_refused_before_anything_runs(model: Path, tmp_path: Path) -> None:
    """Against codes and llguidance's words; the scheduler then serves as before. So it does from the start with a
    tokenizer that llguidance knows nothing of."""

    async def refusal(directory: Path, sampling: Sampling) -> RequestRefused:
        async with engine(directory) as rig, rig.client() as client:
            with pytest.raises(RequestRefused) as refused:
                await client.generate(token_ids=PROMPT, sampling=sampling).text()
            stats = await client.stats()
            assert (stats.refused, stats.failed, rig.worker.steps) == (1, 0, [])
            plain = Sampling(max_tokens=2, ignore_eos=True)
            stream = client.generate(token_ids=PROMPT, sampling=plain)
            tokens = [token async for piece in stream for token in piece.token_ids]
            assert tokens == expected(PROMPT, 2, rig.service.vocab_size)
        return refused.value

    async def main() -> None:
        nonsense = await refusal(model, Sampling(grammar="start: nobody"))
        assert nonsense.code == "invalid_grammar" and 'unknown name: "nobody"' in nonsense.detail
        (tmp_path / "config.json").write_text("{}", "utf-8")
        without = await refusal(tmp_path, Sampling(grammar="start: /a/"))
        assert without.code == "no_tokenizer" and without.detail.startswith("grammar needs a tokenizer")
        words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(60)}, "word0"))
        words.save(str(tmp_path / "tokenizer.json"))
        unknown = await refusal(tmp_path, Sampling(grammar="start: /a/"))
        assert unknown.code == "no_tokenizer" and "a kind that llguidance can read" in unknown.detail

    on_loop("selector", main)


class Allows:
    """A grammar of any `length` tokens, of which the one at `breaks` leads nowhere."""

    def __init__(self, length: int, breaks: int = -1) -> None:
        self.taken: list[int] = []
        self._length = length
        self._breaks = breaks

    @property
    def is_over(self) -> bool:
        return len(self.taken) == self._length

    @property
    def fault(self) -> str:
        return "there is no way on" if len(self.taken) == self._breaks else ""

    def allowed(self) -> bytes:
        return len(self.taken).to_bytes(4, "little")

    def take(self, token: int) -> None:
        self.taken.append(token)


def test_a_grammar_that_goes_wrong_ends_its_request_alone() -> None:
    """Against made-up grammars: the token before is still sent, and the others end as they would."""
    core = Core(CoreLimits(pages=30, page_tokens=4, max_running=4, demand_tokens=8, chunk_tokens=16))
    held = [Allows(5), Allows(5, breaks=3), None]
    requests = [
        Request(i, [1, 2 + i], StepSampling(), Ending(5), NoText(), 0.0, allows) for i, allows in enumerate(held)
    ]
    ends: dict[int, object] = {}
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for request in requests:
        core.submit(request)
    while step := core.plan(0.0):
        for sequence in step.sequences:
            assert told_of(sequence) == (len(tokens[sequence.sequence]) if sequence.sequence < 2 else None)
        done = StepDone([7 if s.sample else -1 for s in step.sequences], ExpertStats())
        for reply in core.apply(done, 0.0):
            if isinstance(reply.message, Tokens):
                tokens[reply.request.sequence] += reply.message.token_ids
            else:
                ends[reply.request.sequence] = reply.message
    assert {number: len(drawn) for number, drawn in tokens.items()} == {0: 5, 1: 3, 2: 5}
    assert ends[1] == Failed("grammar_failed", "the grammar went wrong: there is no way on")
    assert [end.reason for end in (ends[0], ends[2]) if isinstance(end, Finished)] == ["stop", "length"]
    assert core.pages.own == 0 and core.running == 0


def test_an_answer_that_has_no_text_ends_its_request_alone() -> None:
    """Against a tokenizer that falls over the second token of one of two, also where that is its last."""
    core = Core(CoreLimits(pages=64, page_tokens=16, max_running=8, demand_tokens=8, chunk_tokens=64))
    faulty = [NoText(), NoText(), NoText()]
    lengths = (5, 2, 5)
    requests = [Request(i, [1, 2 + i], StepSampling(), Ending(lengths[i]), faulty[i], 0.0) for i in range(3)]
    ends: dict[int, object] = {}
    for request in requests:
        core.submit(request)
    while step := core.plan(0.0):
        for number in (0, 1):
            faulty[number].fault = "index out of bounds" if requests[number].new_tokens == 1 else faulty[number].fault
        for reply in core.apply(StepDone([7 if s.sample else -1 for s in step.sequences], ExpertStats()), 0.0):
            if not isinstance(reply.message, Tokens):
                ends[reply.request.sequence] = reply.message
    failed = Failed("text_failed", "the tokenizer cannot decode the answer: index out of bounds")
    assert [ends[0], ends[1]] == [failed, failed] and isinstance(ends[2], Finished)
    assert core.pages.own == 0 and core.running == 0 and requests[0].new_tokens == requests[1].new_tokens == 2


def told_of(sequence: SequenceStep) -> int | None:
    """How many tokens had been taken when the mask of Allows was made; None if there is none."""
    assert sequence.sample
    changes = sequence.sample.changes or Changes()
    return int.from_bytes(changes.allowed, "little") if changes.allowed else None
