"""The step policy and routing against their rules."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from scheduler.chunking import cut_chunks, is_short
from scheduler.policy import CACHED_PER_LOAD, Turn, after, next_kind, route

DEMAND_TOKENS, CHUNK_TOKENS = 8, 20


class Job(Struct):
    """A prompt that is prefilled and then decoded, and what it waited for since it was the first of its class.

    Its class stays what it was when it arrived, as that of a request that has begun does.
    """

    arrival: int
    pending: int
    tokens: int  # still to be decoded once it is prefilled
    short: bool
    waited: int = 0


class Simulation:
    """Steps as the policy orders them. Asserts at each step what its rules promise about the steps before."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.turn = Turn()
        self.prefills_in_a_row = 0  # while somebody decoded
        self.decodes_in_a_row = 0  # while somebody prefilled
        self.arrived = 0

    def arrive(self, pending: int, tokens: int) -> None:
        self.jobs.append(Job(self.arrived, pending, tokens, is_short(pending, DEMAND_TOKENS, CHUNK_TOKENS)))
        self.arrived += 1

    def step(self) -> bool:
        decoding = [job for job in self.jobs if not job.pending]
        prefilling = [job for job in self.jobs if job.pending]
        heads = {short: next((job for job in prefilling if job.short == short), None) for short in (True, False)}
        kind = next_kind(self.turn, bool(decoding), heads[True] is not None, heads[False] is not None)
        assert (kind is None) == (not self.jobs)
        if kind is None:
            return False
        self.turn = after(self.turn, kind)
        self.decodes_in_a_row = self.decodes_in_a_row + 1 if kind == "decode" and prefilling else 0
        self.prefills_in_a_row = self.prefills_in_a_row + 1 if kind != "decode" and decoding else 0
        assert self.decodes_in_a_row <= 1, "a prompt waits for one token at a time"
        assert self.prefills_in_a_row <= 1, "an answer waits for one chunk at a time"
        if kind == "decode":
            for job in decoding:
                job.tokens -= 1
        else:
            self._prefill(kind == "short", heads)
        self.jobs = [job for job in self.jobs if job.pending or job.tokens]
        return True

    def _prefill(self, short: bool, heads: dict[bool, Job | None]) -> None:
        mine = [job for job in self.jobs if job.pending and job.short == short]
        counts = cut_chunks([job.pending for job in mine], CHUNK_TOKENS)
        if other := heads[not short]:
            other.waited += 1
            assert other.waited <= 1, (
                "a short one waits for one chunk of a long one, and a long one for one of short ones"
            )
        for job, count in zip(mine, counts, strict=False):
            job.pending -= count
            job.waited = 0


@settings(max_examples=300)
@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 70), st.integers(0, 6))), max_size=60))
def test_nobody_waits_for_more_than_one_chunk_of_another_kind(history: list[tuple[int, int] | None]) -> None:
    run = Simulation()
    for arrival in history:
        if arrival:
            run.arrive(*arrival)
        else:
            run.step()
    for _ in range(20 * len(history)):  # more than all chunks and tokens there are
        run.step()
    assert not run.jobs, "everybody ends"


@given(st.data())
def test_the_longest_prefix_decides_until_its_worker_has_too_much_to_do(data: st.DataObject) -> None:
    """By a search through all workers."""
    count = data.draw(st.integers(1, 5))
    loads = data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    cached = data.draw(st.lists(st.sampled_from([0, 16, 32, 160]), min_size=count, max_size=count))
    chosen = route(loads, cached)
    equals = [i for i in range(count) if cached[i] == max(cached)]
    warmest = next(i for i in equals if loads[i] == min(loads[j] for j in equals))
    excess = loads[warmest] - min(loads)
    assert chosen == (warmest if excess * CACHED_PER_LOAD <= cached[warmest] else loads.index(min(loads)))


def test_where_a_new_request_goes() -> None:
    assert route([5], [0]) == 0
    assert route([9, 3, 3], [0, 0, 0]) == 1, "the first of the least loaded"
    assert route([200, 100], [8000, 0]) == 0, "the cached prefix"
    assert route([200, 100, 50], [8000, 8000, 16]) == 1, "the less loaded of those that have it"
    assert route([2101, 100], [8000, 0]) == 1, "a prefix that all ask for does not overload one worker"
    assert route([100, 0], [16, 0]) == 1, "a page is not worth waiting for"
