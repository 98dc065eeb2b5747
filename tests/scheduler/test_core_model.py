"""The core loop with a real model: scarce KV and reused KV against plenty of it and none reused.

The model is a tiny random one, over the real slot pool and copier; greedy and drawn answers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from scheduler.core import Core, CoreLimits
from scheduler.detokenize import NoText
from scheduler.protocol import Finished, Usage
from scheduler.request import Ending, Request
from tests.worker.test_bit_identity import PAGE_TOKENS, Engine, engine, ids
from worker.protocol import Sampling, StepDone

PLENTY = CoreLimits(
    pages=80, page_tokens=PAGE_TOKENS, max_running=1, demand_tokens=24, chunk_tokens=48, prefix_cache=False
)
REUSED = CoreLimits(pages=80, page_tokens=PAGE_TOKENS, max_running=6, demand_tokens=24, chunk_tokens=48)
SCARCE = CoreLimits(pages=11, page_tokens=PAGE_TOKENS, max_running=6, demand_tokens=24, chunk_tokens=48)
"""The longest request takes 10 pages."""


@pytest.fixture(scope="module")
def model() -> Iterator[Engine]:
    with on_one_thread(), engine(experts=8, k=2, dtype="float32", slots=8) as running:
        yield running


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Matrices this small are not worth a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Session:
    """Requests to one core over the model."""

    def __init__(self, model: Engine, limits: CoreLimits) -> None:
        self.core = Core(limits)
        self.usages: dict[int, Usage] = {}
        self._model = model

    def ask(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """The answers to all, asked at once; every other one greedy."""
        requests = [
            Request(i, prompt, Sampling(temperature=i % 2, seed=i), Ending(max_tokens), NoText(), 0.0)
            for i, prompt in enumerate(prompts)
        ]
        for request in requests:
            self.core.submit(request)
        while step := self.core.plan(0.0):
            result = self._model.runner.run(step)
            for reply in self.core.apply(StepDone(result.tokens, result.stats), 0.0):
                if isinstance(reply.message, Finished):
                    self.usages[reply.request.sequence] = reply.message.usage
        return [request.tokens[request.prompt_tokens :] for request in requests]


def test_preempted_requests_answer_as_if_there_were_plenty_of_kv(model: Engine) -> None:
    prompts = [ids(20 + 15 * i, seed=i) for i in range(5)]
    scarce = Session(model, SCARCE)
    assert scarce.ask(prompts, 60) == Session(model, PLENTY).ask(prompts, 60)
    assert scarce.core.preempted >= 2


def test_preempted_requests_answer_so_where_every_rounding_shows_too() -> None:
    """In bfloat16, where a token's KV is not bit for bit the same in a chunk of many and in a step of one."""
    prompts = [ids(20 + 15 * i, seed=i) for i in range(5)]
    with on_one_thread(), engine(experts=8, k=2, dtype="bfloat16", slots=8) as model:
        scarce = Session(model, SCARCE)
        assert scarce.ask(prompts, 60) == Session(model, PLENTY).ask(prompts, 60)
        assert scarce.core.preempted >= 2


def test_a_second_turn_over_a_cached_prefix_answers_as_without_a_cache(model: Engine) -> None:
    """Histories of 90 to 190 tokens, of which two share their first 100."""
    first = [ids(70, seed=1), [*ids(100, seed=2), *ids(70, seed=3)], [*ids(100, seed=2), *ids(41, seed=4)]]
    reused = Session(model, REUSED)
    answers = reused.ask(first, 20)
    turns = [[*prompt, *answer, *ids(9, seed=5)] for prompt, answer in zip(first, answers, strict=True)]
    second_answers = reused.ask(turns, 20)
    alone = Session(model, PLENTY)  # in the same pages, so that it comes after
    assert answers == alone.ask(first, 20)
    assert second_answers == alone.ask(turns, 20)
    for i, (prompt, usage) in enumerate(zip(first, reused.usages.values(), strict=True)):
        cached = (len(prompt) + 19) // PAGE_TOKENS * PAGE_TOKENS
        assert usage.cached_tokens == cached, i
        assert usage.demand_chunks + usage.streamed_chunks == 1, i
    assert alone.core.cached_tokens == 0
