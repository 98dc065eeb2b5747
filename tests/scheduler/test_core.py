"""The core loop against what every schedule must keep, over random arrivals, lengths and aborts.

A made-up worker answers each step; checked are page ownership, token bounds, modes, order and that everybody ends.
"""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core import Core, CoreLimits, split_stats
from scheduler.detokenize import NoText
from scheduler.protocol import Finished, Tokens, Usage
from scheduler.request import Ending, Request
from worker.protocol import ExpertStats, RunStep, Sampling, StepDone

RECORD_NBYTES = 640
LIMITS = CoreLimits(pages=24, page_tokens=4, max_running=3, demand_tokens=5, chunk_tokens=8)


def make_request(sequence: int, prompt: int, max_tokens: int) -> Request:
    return Request(sequence, list(range(prompt)), Sampling(), Ending(max_tokens), NoText(), arrived_s=0.0)


def answer(step: RunStep, misses: int = 0) -> StepDone:
    tokens = [7 if s.sample else -1 for s in step.sequences]
    stats = ExpertStats(1, misses + 2, 2, misses, misses * RECORD_NBYTES)
    return StepDone(tokens, stats)


def check_step(step: RunStep) -> None:
    sizes = [len(s.tokens) for s in step.sequences]
    total = sum(sizes)
    if step.mode == "decode":
        assert sizes == [1] * len(sizes)
        assert all(s.sample for s in step.sequences)
    else:
        assert total <= LIMITS.chunk_tokens
        assert step.mode == ("demand" if total <= LIMITS.demand_tokens else "streamed")
    pages = [page for s in step.sequences for page in s.pages]
    assert len(set(pages)) == len(pages), "a page belongs to one request"
    for s in step.sequences:
        assert len(s.pages) == -(-(s.start + len(s.tokens)) // LIMITS.page_tokens)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 12)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
        st.tuples(st.just("fail"), st.just(0), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("abort_out"), st.integers(0, 20), st.just(0)),
    ),
    max_size=60,
)


def added(a: ExpertStats, b: ExpertStats) -> ExpertStats:
    return ExpertStats(*(getattr(a, name) + getattr(b, name) for name in ExpertStats.__struct_fields__))


class Run:
    """A core and the made-up worker's side of it. Every step reports `misses` experts missed and 2 hit."""

    def __init__(self, misses: int = 0) -> None:
        self.misses = misses
        self.usages: list[Usage] = []  # what the clients of finished and aborted requests were told
        self.unreported = ExpertStats()  # shares of requests that had ended when their step was back
        self.core = Core(LIMITS)
        self.requests: list[Request] = []
        self.over: dict[int, str] = {}
        self.tokens: dict[int, int] = {}
        self.started: list[int] = []

    def submit(self, prompt: int, max_tokens: int) -> None:
        request = make_request(len(self.requests), prompt, max_tokens)
        self.requests.append(request)
        self.core.submit(request)

    def abort(self, index: int) -> None:
        if index < len(self.requests) and index not in self.over:
            self.core.abort(self.requests[index])
            self.over[index] = "abort"
            self.usages.append(self.requests[index].finished("abort", 2.0).usage)

    def step(self, abort: int | None = None, fail: bool = False) -> bool:
        step = self.core.plan(1.0)
        if step is None:
            return False
        check_step(step)
        for s in step.sequences:
            assert s.sequence not in self.over, "who has ended is not stepped"
            if s.start == 0:
                self.started.append(s.sequence)
        if abort is not None:
            self.abort(abort)
        if fail:
            self.over |= {request.sequence: "failed" for request in self.core.fail_step()}
            return True
        done = answer(step, self.misses)
        shares = split_stats(done.stats, [len(s.tokens) for s in step.sequences])
        for s, share in zip(step.sequences, shares, strict=True):
            if s.sequence in self.over:
                self.unreported = added(self.unreported, share)
        for reply in self.core.apply(done, 2.0):
            sequence = reply.request.sequence
            assert sequence not in self.over
            match reply.message:
                case Tokens(token_ids=ids):
                    self.tokens[sequence] = self.tokens.get(sequence, 0) + len(ids)
                case Finished(reason=reason, usage=usage):
                    self.over[sequence] = reason
                    self.usages.append(usage)
        return True

    def act(self, action: tuple[str, int, int]) -> None:
        match action:
            case ("submit", prompt, max_tokens):
                self.submit(prompt, max_tokens)
            case ("step", _, _):
                self.step()
            case ("fail", _, _):
                self.step(fail=True)
            case ("abort", index, _):
                self.abort(index)
            case ("abort_out", index, _):
                self.step(abort=index)


@settings(max_examples=200)
@given(ACTIONS)
def test_everybody_ends_in_order_and_every_page_comes_back(actions: list[tuple[str, int, int]]) -> None:
    run = Run()
    for action in actions:
        run.act(action)
    assert run.core.waiting + run.core.running == len(run.requests) - len(run.over)
    while run.step():
        pass
    assert len(run.over) == len(run.requests)
    assert run.core.pages.free == LIMITS.pages
    assert run.started == sorted(run.started), "first come, first served"
    for request in run.requests:
        if run.over[request.sequence] == "length":
            assert run.tokens[request.sequence] == request.max_tokens


@given(ACTIONS, st.sampled_from([0, 1, 7, 128]))
def test_figures_add_up_but_for_requests_that_failed_and_steps_that_were_out(
    actions: list[tuple[str, int, int]], misses: int
) -> None:
    """Exactly as protocol.Usage says what is missing; what a failed step did is in no figure."""
    run = Run(misses)
    for action in actions:
        run.act(action)
    while run.step():
        pass
    failed = [r.finished("abort", 2.0).usage for r in run.requests if run.over[r.sequence] == "failed"]
    usages = [*run.usages, *failed]
    assert len(usages) == len(run.requests), "every request ends once"
    counters = run.core.counters.values()
    unreported = run.unreported
    assert sum(u.expert_misses for u in usages) + unreported.misses == sum(c.misses for c in counters)
    assert sum(u.expert_hits for u in usages) + unreported.hits == sum(c.hits for c in counters)
    assert sum(u.copied_nbytes for u in usages) + unreported.copied_nbytes == sum(c.copied_nbytes for c in counters)


@given(ACTIONS)
def test_a_dead_worker_ends_everybody_once(actions: list[tuple[str, int, int]]) -> None:
    run = Run()
    for action in actions:
        run.act(action)
    run.core.plan(1.0)
    failed = [request.sequence for request in run.core.fail_all()]
    assert sorted([*failed, *run.over]) == list(range(len(run.requests)))
    assert run.core.pages.free == LIMITS.pages
    assert run.core.waiting == run.core.running == 0


def steps(core: Core) -> Iterator[RunStep]:
    while step := core.plan(0.0):
        yield step
        core.apply(answer(step), 0.0)


def test_a_long_prompt_stalls_an_answer_by_one_chunk_at_a_time() -> None:
    core = Core(LIMITS)
    core.submit(make_request(0, 1, 9))
    core.submit(make_request(1, 40, 1))
    kinds = ["decode" if s.mode == "decode" else "prefill" for s in steps(core)]
    busy = kinds[: len(kinds) - kinds[::-1].index("prefill")]
    assert busy.count("prefill") == 6  # [1], then five chunks of 8
    assert "prefill,prefill" not in ",".join(busy)


def test_short_prompts_share_a_demand_chunk_up_to_the_threshold() -> None:
    core = Core(LIMITS)
    for sequence, prompt in enumerate([2, 3, 1]):
        core.submit(make_request(sequence, prompt, 1))
    assert [(s.mode, [len(q.tokens) for q in s.sequences]) for s in steps(core)] == [
        ("demand", [2, 3]),
        ("demand", [1]),
    ]


def test_who_does_not_fit_waits_for_pages_and_nobody_overtakes() -> None:
    core = Core(LIMITS)  # 96 tokens
    core.submit(make_request(0, 60, 4))
    big, small = make_request(1, 60, 4), make_request(2, 1, 1)
    assert core.would_wait(big)
    core.submit(big)
    assert core.would_wait(small)
    core.submit(small)
    assert (core.running, core.waiting) == (1, 2)


@pytest.mark.parametrize("misses", [0, 1, 7, 128])
def test_usage_of_all_requests_adds_up_to_the_counters(misses: int) -> None:
    core = Core(LIMITS)
    for sequence, (prompt, new) in enumerate([(3, 2), (2, 4), (20, 1)]):
        core.submit(make_request(sequence, prompt, new))
    usages = []
    while step := core.plan(0.0):
        replies = core.apply(answer(step, misses), 0.0)
        usages += [reply.message.usage for reply in replies if isinstance(reply.message, Finished)]
    counters = core.counters.values()
    assert sum(u.expert_misses for u in usages) == sum(c.misses for c in counters)
    assert sum(u.expert_hits for u in usages) == sum(c.hits for c in counters)
    assert sum(u.copied_nbytes for u in usages) == sum(c.copied_nbytes for c in counters)
    assert all(u.copied_nbytes == u.expert_misses * RECORD_NBYTES for u in usages)


def test_a_request_alone_in_a_step_has_all_of_its_figures() -> None:
    stats = ExpertStats(1, 9, 4, 5, 5 * RECORD_NBYTES)
    assert split_stats(stats, [128]) == [stats]
