"""The core loop with a real model that has recurrent state: reused and restored states against computing all anew.

The model is a tiny random Qwen3-Next of transformers' making, in float32; its experts are all resident. Greedy and
drawn answers of a session, with turns over what was cached, preemption, aborts and failed steps in between, are those
of a core that caches nothing and runs one request at a time.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from scheduler.core import Core, CoreLimits
from scheduler.detokenize import NoText
from scheduler.request import Ending, Request
from tests.scheduler.test_core_model import on_one_thread
from tests.worker import device_model as device
from tests.worker.resident_experts import resident_runner
from worker.protocol import RunStep, Sampling, StepDone
from worker.step import StepRunner

PAGES, PAGE_TOKENS, VOCAB = 60, 4, 199
COLD = CoreLimits(
    pages=PAGES, page_tokens=PAGE_TOKENS, max_running=1, demand_tokens=24, chunk_tokens=256, prefix_cache=False,
    state_slots=1,
)  # fmt: skip
REUSED = replace(COLD, max_running=4, chunk_tokens=24, prefix_cache=True, state_slots=16)
SCARCE = replace(REUSED, pages=18, state_slots=6)
"""The longest request takes 16 pages."""


@pytest.fixture(scope="module")
def runner(goldens: Path) -> Iterator[StepRunner]:
    with on_one_thread():
        yield resident_runner(
            str(goldens / "qwen3_next"), num_pages=PAGES, page_tokens=PAGE_TOKENS, state_slots=REUSED.state_slots
        )


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Session:
    """Requests to one core over the model."""

    def __init__(self, runner: StepRunner, limits: CoreLimits) -> None:
        self.core = Core(limits)
        self.steps = list[RunStep]()
        self._runner = runner
        self._sequences = 0

    def submit(self, prompt: list[int], max_tokens: int) -> Request:
        self._sequences += 1
        request = Request(
            self._sequences,
            prompt,
            Sampling(temperature=len(prompt) % 2, seed=len(prompt)),
            Ending(max_tokens),
            NoText(),
            0.0,
        )
        self.core.submit(request)
        return request

    def step(self, abort: Request | None = None, fail: bool = False) -> bool:
        """One step, while which `abort` ends. It runs, but is answered with an error if it is to `fail`."""
        step = self.core.plan(0.0)
        if step is None:
            return False
        self.steps.append(step)
        if abort:
            self.core.abort(abort)
        result = self._runner.run(step)
        if fail:
            self.core.fail_step()
        else:
            self.core.apply(StepDone(result.tokens, result.stats), 0.0)
        return True

    def ask(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """The answers to all, asked at once."""
        requests = [self.submit(prompt, max_tokens) for prompt in prompts]
        while self.step():
            pass
        return [request.tokens[request.prompt_tokens :] for request in requests]

    @property
    def restores(self) -> int:
        return sum(sequence.restore >= 0 for step in self.steps for sequence in step.sequences)


def turns_of(prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    return [[*prompt, *answer, *ids(5, seed=9)] for prompt, answer in zip(prompts, answers, strict=True)]


def check_conversations(runner: StepRunner, cold: CoreLimits, reused: CoreLimits, scarce: CoreLimits) -> None:
    """Three conversations, two of which begin alike; one prompt is asked for two more answers at once."""
    page = cold.page_tokens
    shared = ids(2 * page + 14, seed=1)
    prompts = [[*shared, *ids(7, seed=2)], [*shared, *ids(12, seed=3)], ids(3 * page + 19, seed=4)]
    alone = Session(runner, cold)
    answers = alone.ask(prompts, 11)
    turns = [*turns_of(prompts, answers), prompts[2], prompts[2]]
    second = alone.ask(turns, 9)
    assert alone.restores == 0 and alone.core.cached_tokens == 0
    assert len({token for answer in answers for token in answer}) > 20, "they tell states apart"
    for limits in (reused, scarce):
        warm = Session(runner, limits)
        assert [warm.ask(prompts, 11), warm.ask(turns, 9)] == [answers, second]
        assert warm.restores >= 5 and (warm.core.preempted > 0) == (limits is scarce)
        whole_pages = sum((len(turn) - 6) // page for turn in turns[:3]) + 2 * ((len(prompts[2]) - 1) // page)
        if limits is reused and limits.state_slots >= 16:  # with fewer some of the snapshots have made way
            assert warm.core.cached_tokens == whole_pages * page


def test_turns_over_restored_states_answer_as_if_all_were_computed_anew(runner: StepRunner) -> None:
    check_conversations(runner, COLD, REUSED, SCARCE)


@pytest.mark.gpu
def test_turns_over_restored_states_answer_so_on_a_gpu(goldens: Path) -> None:
    """With pages of 16 tokens, and decode by graph, where a state is restored and snapshots are made beside it."""
    cold = replace(COLD, pages=32, page_tokens=device.PAGE_TOKENS, chunk_tokens=device.LONGEST)
    reused = replace(REUSED, pages=64, page_tokens=device.PAGE_TOKENS, chunk_tokens=48, state_slots=device.STATE_SLOTS)
    with device.device_model(str(goldens / "qwen3_next"), "float32", graphs=True) as made:
        check_conversations(made.runner, cold, reused, replace(reused, pages=8, state_slots=6))
        assert made.graphs is not None and len(made.graphs.sizes) > 1


def test_requests_that_are_stopped_leave_no_trace_in_the_answers_of_others(runner: StepRunner) -> None:
    """Aborted between steps and while one is out, and failed, with all of their prefixes shared."""
    prompt = ids(30, seed=5)
    prompts = [prompt, [*prompt[:17], *ids(9, seed=6)]]
    warm = Session(runner, SCARCE)
    for steps, out, fail in ((1, False, False), (2, True, False), (3, False, True), (5, True, True), (7, True, False)):
        pair = [warm.submit([*prompts[(steps + i) % 2], *ids(steps, seed=steps)], 9) for i in range(2)]
        for _ in range(steps):
            warm.step()
        warm.step(abort=pair[0] if out else None, fail=fail)
        for request in pair:
            warm.core.abort(request)
    turns = turns_of(prompts, [[], []])
    answers = warm.ask(turns, 12)
    assert answers == Session(runner, COLD).ask(turns, 12)
    assert warm.restores >= 5 and warm.core.cached_tokens > 100
