"""How long short prompts wait for their first token while a long one prefills, in chunks of that: the core over a
worker whose steps take their time by a formula."""

from collections.abc import Callable

import pytest

from scheduler.core import Core, CoreLimits
from scheduler.detokenize import NoText
from scheduler.protocol import Finished, Tokens
from scheduler.request import Ending, Request
from tests.scheduler.paged_worker import PagedWorker
from worker.protocol import RunStep, Sampling

SHORT, AT_ONCE = 500, 64
SHORT_TOKENS, LONG_TOKENS = 12, 8000
MOST_CHUNKS = 2.0


class Crowd:
    """A long prompt, and clients of which each asks for a short answer once it has the one before, in made-up time."""

    def __init__(self, limits: CoreLimits, step_s: Callable[[RunStep], float], most_new: int) -> None:
        self.core, self.worker = Core(limits), PagedWorker(limits.page_tokens)
        self.step_s, self.most_new = step_s, most_new
        self.now_s = 0.0
        self.asked_s: list[float] = []
        self.first_s: dict[int, float] = {}
        self.chunks_s: list[float] = []  # of the long prompt
        self.finished: set[int] = set()

    def ask(self, prompt_tokens: int, new_tokens: int) -> None:
        number = len(self.asked_s)
        prompt = [(number * 7 + i) % 900 for i in range(prompt_tokens)]
        self.asked_s.append(self.now_s)
        self.core.submit(Request(number, prompt, Sampling(), Ending(new_tokens), NoText(), self.now_s))

    def ask_short(self) -> None:
        self.ask(SHORT_TOKENS, 1 + len(self.asked_s) * 5 % self.most_new)

    def run(self) -> None:
        self.ask(LONG_TOKENS, 2)
        while step := self.core.plan(self.now_s):
            took_s = self.step_s(step)
            if step.mode != "decode" and step.sequences[0].sequence == 0:
                self.chunks_s.append(took_s)
            if len(self.asked_s) == 1:  # the clients come in the middle of the long one's first chunk
                self.now_s += took_s / 2
                for _ in range(AT_ONCE):
                    self.ask_short()
                took_s /= 2
            self.now_s += took_s
            for reply in self.core.apply(self.worker.run(step), self.now_s):
                number = reply.request.sequence
                if isinstance(reply.message, Tokens):
                    self.first_s.setdefault(number, self.now_s - self.asked_s[number])
                elif isinstance(reply.message, Finished):
                    self.finished.add(number)
                    if number and len(self.asked_s) <= SHORT:
                        self.ask_short()


def on_a_cpu(step: RunStep) -> float:
    """Seconds as of the built-in model on 2 cores: mostly by tokens."""
    return 0.015 + 0.00012 * sum(len(sequence.tokens) for sequence in step.sequences)


def over_a_link(step: RunStep) -> float:
    """As of Flash-Next's geometry on an H200, where a streamed chunk of any length takes what its copies take."""
    tokens = sum(len(sequence.tokens) for sequence in step.sequences)
    if step.mode == "decode":
        return min(0.02 + 0.014 * tokens, 0.6)
    return 1.14 if step.mode == "streamed" else min(0.45 + 0.001 * tokens, 1.14)


@pytest.mark.parametrize("most_new", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("chunk", "demand"), [(4096, 512), (2048, 512), (1024, 512), (1024, 128), (1024, 8), (1024, 0)]
)
def test_short_prompts_have_their_first_token_within_two_chunks_of_a_long_one(
    chunk: int, demand: int, most_new: int
) -> None:
    """The 95th of 100. With a demand threshold as by default, small ones, and none, as of a dense model."""
    crowd = crowd_of(on_a_cpu, chunk, demand, most_new)
    waited_s = sorted(seconds for number, seconds in crowd.first_s.items() if number)
    chunk_s = sum(crowd.chunks_s) / len(crowd.chunks_s)
    assert waited_s[len(waited_s) * 95 // 100] <= MOST_CHUNKS * chunk_s
    assert len(crowd.chunks_s) == -(-LONG_TOKENS // chunk), "which goes on by a whole chunk at a time"
    assert crowd.first_s[0] < 3 * sum(crowd.chunks_s)


@pytest.mark.parametrize("demand", [512, 0])
def test_over_a_link_they_wait_for_three(demand: int) -> None:
    """A chunk of short ones streams as much there as one of the long prompt, and a token of 64 answers takes half as
    long: who comes as the one begins waits for it, and then for both and a token after each."""
    crowd = crowd_of(over_a_link, 4096, demand, most_new=6)
    assert max(seconds for number, seconds in crowd.first_s.items() if number) <= 3.1 * 1.14


def crowd_of(step_s: Callable[[RunStep], float], chunk: int, demand: int, most_new: int) -> Crowd:
    limits = CoreLimits(
        pages=4000,
        page_tokens=16,
        max_running=AT_ONCE + 1,
        demand_tokens=demand,
        chunk_tokens=chunk,
        prefix_cache=False,
    )
    crowd = Crowd(limits, step_s, most_new)
    crowd.run()
    assert crowd.finished == set(range(SHORT + 1))
    return crowd
