"""Several answers to one Generate, over real sockets: against the same answers asked for one by one."""

import asyncio
from pathlib import Path

import pytest

from copyengine.wire.errors import RequestRefused
from scheduler.choices import combined
from scheduler.protocol import Choice, Finished, Sampling, Timing, Usage
from tests.scheduler.rig import Rig, engine, expected, on_loop

PROMPT = list(range(40, 80))


def prefills(rig: Rig) -> list[tuple[int, int, int]]:
    """Of each prefill chunk its first position, length and, if it draws, its seed."""
    return [
        (s.start, len(s.tokens), s.sample.seed if s.sample else -1)
        for step in rig.worker.steps
        if step.mode != "decode"
        for s in step.sequences
    ]


async def all_pages_back(rig: Rig) -> None:
    """Wait until nothing runs, and the step that is out has come back."""
    await rig.settled()
    async with asyncio.timeout(20):
        while not rig.pages_free():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_each_answer_has_its_index_its_seed_and_its_end(model: Path) -> None:
    """The prompt is computed once: the others begin after its last full page of 16."""

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            sampling = Sampling(temperature=1.0, seed=2**63 - 2, n=3, max_tokens=5, ignore_eos=True)
            answer = client.generate(token_ids=PROMPT, sampling=sampling)
            tokens: dict[int, list[int]] = {}
            async for piece in answer:
                tokens.setdefault(piece.index, []).extend(piece.token_ids)
            assert tokens == dict.fromkeys(range(3), expected(PROMPT, 5, rig.service.vocab_size))
            assert prefills(rig) == [(0, 40, 2**63 - 2), (32, 8, 2**63 - 1), (32, 8, 0)]
            assert answer.finished is not None
            usage, choices = answer.finished.usage, answer.finished.choices
            assert [choice.reason for choice in choices] == ["length"] * 3
            assert [choice.usage.cached_tokens for choice in choices] == [0, 32, 32]
            assert (usage.prompt_tokens, usage.new_tokens, usage.cached_tokens) == (40, 15, 0)
            await all_pages_back(rig)
            stats = await client.stats()
            assert (stats.finished, stats.prompt_tokens, stats.generated_tokens) == (1, 40, 15)
            misses = [mode.misses for mode in (stats.decode, stats.demand, stats.streamed)]
            assert usage.expert_misses == sum(misses)

    on_loop("selector", main)


def test_one_answer_has_no_choices(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            answer = client.generate(token_ids=PROMPT, sampling=Sampling(max_tokens=2, ignore_eos=True))
            assert {piece.index async for piece in answer} == {0}
            assert answer.finished and answer.finished.choices == []

    on_loop("selector", main)


@pytest.mark.parametrize("when", ["the first computes the prompt", "all run"])
def test_an_abort_ends_all_answers(model: Path, when: str) -> None:
    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.step_s = 0.01
            sampling = Sampling(n=4, max_tokens=3000, ignore_eos=True)
            answer = client.generate(token_ids=PROMPT, sampling=sampling)
            if when != "all run":
                rig.worker.gate.clear()
            seen = set()

            async def read() -> None:
                async for piece in answer:
                    seen.add(piece.index)
                    if len(seen) == 4:
                        await client.abort(answer.request_id)

            reading = asyncio.create_task(read())
            if when != "all run":
                await rig.settled(running=4)
                stats = await client.stats()
                assert (stats.running, stats.waiting) == (1, 3)
                await client.abort(answer.request_id)
                rig.worker.gate.set()
            await reading
            assert answer.finished and answer.finished.reason == "abort"
            assert [choice.reason for choice in answer.finished.choices] == ["abort"] * 4
            await all_pages_back(rig)
            assert (await client.stats()).aborted == 1

    on_loop("selector", main)


@pytest.mark.parametrize(("answers", "late", "queued"), [(4, 2, 1), (3, 1, 0)])
def test_answers_that_would_wait_need_places_in_the_queue(model: Path, answers: int, late: int, queued: int) -> None:
    """Four run at a time, and two of them do already."""

    async def main() -> None:
        async with engine(model, max_running_requests=4, max_queued_requests=queued) as rig, rig.client() as client:
            rig.worker.gate.clear()
            two = client.generate(token_ids=[3] * 20, sampling=Sampling(n=2, max_tokens=2, ignore_eos=True))
            asked = [asyncio.create_task(two.texts())]
            await rig.settled(running=2)
            with pytest.raises(RequestRefused) as refused:
                await client.generate(token_ids=PROMPT, sampling=Sampling(n=answers)).texts()
            assert (refused.value.code, refused.value.detail) == (
                "queue_full",
                f"1 request waits already, {late} of the {answers} answers asked for would too, "
                f"--max-queued-requests is {queued}",
            )
            fits = client.generate(token_ids=PROMPT, sampling=Sampling(n=2, max_tokens=2, ignore_eos=True))
            asked.append(asyncio.create_task(fits.texts()))
            await rig.settled(running=4)
            rig.worker.gate.set()
            assert [len(texts) for texts in await asyncio.gather(*asked)] == [2, 2]
            await all_pages_back(rig)

    on_loop("selector", main)


def test_more_answers_than_there_are_places_at_all_are_refused_for_good(model: Path) -> None:
    """Not as something to try again: an idle engine would not take them either. One less than that is taken."""

    async def main() -> None:
        async with engine(model, max_running_requests=4, max_queued_requests=2) as rig, rig.client() as client:
            with pytest.raises(RequestRefused) as refused:
                await client.generate(token_ids=PROMPT, sampling=Sampling(n=7)).texts()
            assert (refused.value.code, refused.value.detail) == (
                "invalid_request",
                "n is 7, but 4 answers run at a time (--max-running-requests) and 2 may wait (--max-queued-requests)",
            )
            texts = await client.generate(token_ids=PROMPT, sampling=Sampling(n=6, max_tokens=2)).texts()
            assert len(texts) == 6
            await all_pages_back(rig)

    on_loop("selector", main)


def test_answers_that_are_still_held_count_as_load(model: Path) -> None:
    """The next request goes to the other worker, though it has more to do than the first of the answers."""

    async def main() -> None:
        async with engine(model, workers=2) as rig, rig.client() as client:
            for worker in rig.workers:
                worker.gate.clear()
            requests = [(PROMPT, Sampling(n=8, max_tokens=10)), ([3], Sampling(max_tokens=200)), ([4], Sampling())]
            asked = []
            for running, (prompt, sampling) in zip((8, 9, 10), requests, strict=True):
                answer = client.generate(token_ids=prompt, sampling=sampling)
                asked.append(asyncio.create_task(answer.texts()))
                await rig.settled(running=running)
            assert [lane.core.running for lane in rig.lanes] == [1, 2]
            for worker in rig.workers:
                worker.gate.set()
            await asyncio.gather(*asked)

    on_loop("selector", main)


def test_one_that_fails_fails_all(model: Path) -> None:
    """And the next request is served."""

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.bad = {expected(PROMPT, 3, rig.service.vocab_size)[-1]}
            with pytest.raises(RequestRefused, match="not finite") as refused:
                await client.generate(token_ids=PROMPT, sampling=Sampling(n=3, ignore_eos=True)).texts()
            assert refused.value.code == "bad_logits"
            await all_pages_back(rig)
            stats = await client.stats()
            assert (stats.failed, stats.finished) == (1, 0)
            rig.worker.bad.clear()
            sampling = Sampling(n=2, max_tokens=4, ignore_eos=True)
            texts = await client.generate(prompt="a fox", sampling=sampling).texts()
            assert len(texts) == 2 and texts[0] == texts[1] != ""

    on_loop("selector", main)


def test_the_figures_of_several_answers() -> None:
    """Against sums and extremes by hand."""

    def end(reason: str, new: int, timing: Timing) -> Finished:
        return Finished(reason, Usage(7, new, 3, 1, 0, new, 2 * new, 10 * new), timing)  # type: ignore[arg-type]

    ends = [
        end("stop", 4, Timing(0.25, 0.5, 0.125, 1.0)),
        end("length", 6, Timing(0.125, 1.0, 0.375, 4.0)),
        end("stop", 1, Timing(0.5, 2.0, 0.0, 2.0)),
    ]
    assert combined(ends) == Finished(
        "length",
        Usage(7, 11, 3, 3, 0, 11, 22, 110),
        Timing(0.125, 0.5, 0.25, 4.0),
        [Choice(e.reason, e.usage, e.timing) for e in ends],
    )
    aborted = end("abort", 0, Timing(0.0, 0.0, 0.0, 1.0))
    assert combined([*ends, aborted]).reason == "abort"
    assert combined([aborted, aborted]).timing == Timing(0.0, 0.0, 0.0, 1.0)
