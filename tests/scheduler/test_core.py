"""The core loop against what every schedule must keep, over random arrivals, failures and aborts.

A made-up worker with KV pages answers each step; checked are page ownership, token bounds, modes, order, that everybody
ends, and that each answer is the one that needs no pages.
"""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from scheduler.core import Core, CoreLimits
from scheduler.detokenize import NoText
from scheduler.paging import pages_for
from scheduler.protocol import Failed, Finished, Tokens, Usage
from scheduler.request import Ending, Request
from scheduler.traffic import split_stats
from tests.scheduler.paged_worker import RECORD_NBYTES, PagedWorker, answer, audit
from worker.protocol import ExpertStats, RunStep, Sampling, StepDone

LIMITS = CoreLimits(pages=24, page_tokens=4, max_running=3, demand_tokens=5, chunk_tokens=8)
TIGHT = CoreLimits(pages=14, page_tokens=4, max_running=4, demand_tokens=5, chunk_tokens=8)
"""The longest request takes 13 pages."""
SCARCE = [
    LIMITS,
    TIGHT,
    CoreLimits(pages=14, page_tokens=4, max_running=4, demand_tokens=0, chunk_tokens=8, prefix_cache=False),
    CoreLimits(pages=13, page_tokens=4, max_running=9, demand_tokens=16, chunk_tokens=8),
    CoreLimits(
        pages=16, page_tokens=4, max_running=4, demand_tokens=3, chunk_tokens=6
    ),  # chunks that end inside a page
    CoreLimits(pages=52, page_tokens=1, max_running=5, demand_tokens=3, chunk_tokens=64),
]
STATEFUL = [
    replace(limits, state_slots=limits.max_running + snapshots)
    for limits, snapshots in zip(SCARCE, (3, 1, 2, 6, 0, 12), strict=True)
]
"""Of models with recurrent state: with no slot but those of running requests, a few more, and plenty."""
EXACT = [
    replace(limits, chunk_tokens=limits.chunk_tokens + 3, cut_tokens=8)
    for limits in STATEFUL
    if limits.chunk_tokens > 6
]
"""The same, where answers are to repeat bit for bit."""
ANY = [*SCARCE, *STATEFUL, *EXACT]


def make_request(sequence: int, prompt: list[int] | int, max_tokens: int) -> Request:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(sequence, tokens, Sampling(), Ending(max_tokens), NoText(), arrived_s=0.0)


def check_step(step: RunStep, limits: CoreLimits) -> None:
    sizes = [len(s.tokens) for s in step.sequences]
    total = sum(sizes)
    if step.mode == "decode":
        assert sizes == [1] * len(sizes)
        assert all(s.sample for s in step.sequences)
    else:
        assert total <= limits.chunk_tokens
        assert step.mode == ("demand" if total <= limits.demand_tokens else "streamed")
    written = [page for s in step.sequences for page in s.pages[s.start // limits.page_tokens :]]
    assert len(set(written)) == len(written), "a page that is written belongs to one request"
    for s in step.sequences:
        assert len(s.pages) == pages_for(s.start + len(s.tokens), limits.page_tokens)
    check_states(step, limits)
    if step.mode == "decode":  # short ones are in the order of becoming so
        assert [s.sequence for s in step.sequences] == sorted(s.sequence for s in step.sequences)


def check_states(step: RunStep, limits: CoreLimits) -> None:
    """As the worker checks them; of a model without a state a step says nothing of any."""
    if not limits.state_slots:
        assert all((s.state, s.restore, s.snapshots) == (-1, -1, []) for s in step.sequences)
        return
    written = [slot for s in step.sequences for slot in (s.state, *(slot for _, slot in s.snapshots))]
    assert len(set(written)) == len(written) and {*written} <= {*range(limits.state_slots)}
    assert not {s.restore for s in step.sequences} & {*written}
    for s in step.sequences:
        assert s.restore == -1 or s.start > 0
        positions = [position for position, _ in s.snapshots]
        assert all(s.start < position <= s.start + len(s.tokens) for position in positions)
        assert len(set(positions)) == len(positions)
        assert not any(position % limits.page_tokens for position in positions)
        assert limits.prefix_cache or not s.snapshots, "nobody could use them"


PROMPTS = st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 40))
"""Where a prompt leaves the common one, which way, and how long it is."""
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PROMPTS, st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 8), st.none()),
        st.tuples(st.just("fail"), st.none(), st.none()),
        st.tuples(st.just("bad"), st.integers(0, 20), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 20), st.none()),
        st.tuples(st.just("abort_out"), st.integers(0, 20), st.none()),
    ),
    max_size=40,
)
Actions = list[tuple[str, object, object]]


def prompt_of(leaves: int, way: int, length: int) -> list[int]:
    return [i % 7 if i < leaves else 10 * (way + 1) + i % 3 for i in range(length)]


def added(a: ExpertStats, b: ExpertStats) -> ExpertStats:
    return ExpertStats(*(getattr(a, name) + getattr(b, name) for name in ExpertStats.__struct_fields__))


class Run:
    """A core, its worker and its clients. With `audited` all that there is is looked through after each action."""

    def __init__(self, limits: CoreLimits = LIMITS, misses: int = 0, audited: bool = False, tells: bool = True) -> None:
        """`tells`: see PagedWorker."""
        self.limits = limits
        self.worker = PagedWorker(limits.page_tokens, misses)
        self.worker.tells = tells
        self.audited = audited
        self.usages: list[Usage] = []  # what the clients of finished and aborted requests were told
        self.unreported = ExpertStats()  # shares of requests that had ended when their step was back
        self.core = Core(limits)
        self.requests: list[Request] = []
        self.over: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.see: Callable[[RunStep], None] = lambda step: None  # is shown each step that goes out

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        request = make_request(len(self.requests), prompt, max_tokens)
        self.requests.append(request)
        self.core.submit(request)

    def abort(self, index: int) -> None:
        if index < len(self.requests) and index not in self.over:
            self.core.abort(self.requests[index])
            self.over[index] = "abort"
            self.usages.append(self.requests[index].finished("abort", 2.0).usage)

    def step(self, abort: int | None = None, fail: bool = False, bad: int | None = None) -> bool:
        alive = [r for r in self.requests if r.sequence not in self.over]
        step = self.core.plan(1.0)
        if step is None:
            assert not alive, "who has not ended is served"
            return False
        assert alive[0].phase != "waiting", "the oldest is never preempted"
        check_step(step, self.limits)
        self.see(step)
        assert not {s.sequence for s in step.sequences} & set(self.over), "who has ended is not stepped"
        if abort is not None:
            self.abort(abort)
        self.check()
        if bad is not None:
            self.worker.bad = step.sequences[bad % len(step.sequences)].sequence
        if fail:
            self.worker.spoil(step.sequences)
            self.over |= {request.sequence: "failed" for request in self.core.fail_step()}
        else:
            self._apply(step, self.worker.run(step))
        return True

    def _apply(self, step: RunStep, done: StepDone) -> None:
        shares = split_stats(done.stats, [len(s.tokens) for s in step.sequences])
        replies = self.core.apply(done, 2.0)
        failed = {reply.request.sequence for reply in replies if isinstance(reply.message, Failed)}
        for s, share in zip(step.sequences, shares, strict=True):
            if s.sequence in self.over or s.sequence in failed:
                self.unreported = added(self.unreported, share)
        for reply in replies:
            sequence = reply.request.sequence
            assert sequence not in self.over
            match reply.message:
                case Tokens(token_ids=ids):
                    self.tokens[sequence] = self.tokens.get(sequence, []) + ids
                case Finished(reason=reason, usage=usage):
                    self.over[sequence] = reason
                    self.usages.append(usage)
                case Failed():
                    self.over[sequence] = "failed"

    def check(self) -> None:
        if self.audited:
            audit(self.core, self.worker)

    def act(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case ("submit", (int(leaves), int(way), int(length)), int(max_tokens)):
                    self.submit(prompt_of(leaves, way, length), max_tokens)
                case ("step", int(count), _):
                    for _ in range(count):
                        self.step()
                        self.check()
                case ("fail", _, _):
                    self.step(fail=True)
                case ("bad", int(index), _):
                    self.step(bad=index)
                case ("abort", int(index), _):
                    self.abort(index)
                case ("abort_out", int(index), _):
                    self.step(abort=index)
            self.check()

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
            self.check()
        raise AssertionError("it does not come to an end")


@settings(max_examples=300)
@given(st.sampled_from(ANY), ACTIONS, st.booleans())
def test_everybody_ends_in_order_and_every_page_comes_back(limits: CoreLimits, actions: Actions, tells: bool) -> None:
    """And nothing stays cached that is not a number, if the worker `tells` of it at once."""
    run = Run(limits, audited=True, tells=tells)
    run.act(actions)
    assert run.core.waiting + run.core.running == len(run.requests) - len(run.over)
    run.finish()
    assert len(run.over) == len(run.requests)
    assert run.core.waiting == run.core.running == run.core.pages.own == 0
    assert run.core.pages.available == limits.pages
    assert run.core.pages.states.available == limits.state_slots
    assert limits.prefix_cache or run.core.pages.free == limits.pages


@settings(max_examples=300)
@given(st.sampled_from(ANY), ACTIONS)
def test_no_token_is_lost_sent_twice_or_drawn_from_another_prefix(limits: CoreLimits, actions: Actions) -> None:
    """Preempted or not, over cached pages or not, beside steps that fail, bad logits and clients that leave."""
    run = Run(limits)
    run.act(actions)
    run.finish()
    for request in run.requests:
        tokens = run.tokens.get(request.sequence, [])
        wanted = answer(request.tokens[: request.prompt_tokens], request.max_tokens)
        assert tokens == (wanted if run.over[request.sequence] == "length" else wanted[: len(tokens)])


@given(st.sampled_from(ANY), ACTIONS, st.sampled_from([0, 1, 7, 128]))
def test_figures_add_up_but_for_requests_that_failed_and_steps_that_were_out(
    limits: CoreLimits, actions: Actions, misses: int
) -> None:
    """Exactly as protocol.Usage says what is missing; what a failed step did is in no figure."""
    run = Run(limits, misses)
    run.act(actions)
    run.finish()
    failed = [r.finished("abort", 2.0).usage for r in run.requests if run.over[r.sequence] == "failed"]
    usages = [*run.usages, *failed]
    assert len(usages) == len(run.requests), "every request ends once"
    counters = run.core.counters.values()
    unreported = run.unreported
    assert sum(u.expert_misses for u in usages) + unreported.misses == sum(c.misses for c in counters)
    assert sum(u.expert_hits for u in usages) + unreported.hits == sum(c.hits for c in counters)
    assert sum(u.copied_nbytes for u in usages) + unreported.copied_nbytes == sum(c.copied_nbytes for c in counters)
    assert sum(u.cached_tokens for u in usages) == run.core.cached_tokens
    assert all(0 <= u.cached_tokens < u.prompt_tokens for u in usages)
    asked = sum(u.prompt_tokens for u in usages) if limits.prefix_cache else 0
    assert run.core.cached_tokens <= run.core.queried_tokens == asked


@settings(max_examples=200)
@given(st.sampled_from(ANY), ACTIONS)
def test_who_is_first_of_the_short_ones_waits_for_one_chunk_of_a_long_one(limits: CoreLimits, actions: Actions) -> None:
    """Said again over the steps: who is short and has not begun is served in the order of becoming so, as many at a
    time as a chunk takes."""
    run, short = Run(limits), list[Request]()
    waited: dict[int, int] = {}

    def see(step: RunStep) -> None:
        here = {s.sequence for s in step.sequences}
        most = min(max(limits.demand_tokens, limits.chunk_tokens // 8), limits.chunk_tokens)
        prefilling = [r for r in run.requests if r.phase == "prefill"]
        short[:] = [r for r in short if r in prefilling and not r.begun]
        short.extend(r for r in prefilling if r.pending <= most and not r.begun and r not in short)
        if step.mode == "decode" or not short:
            return
        taken = [r for r in short if r.sequence in here]
        assert short[: len(taken)] == taken, "nobody overtakes"
        if not taken:
            waited[short[0].sequence] = waited.get(short[0].sequence, 0) + 1
            assert waited[short[0].sequence] <= 1
        elif len(taken) < len(short):
            assert sum(len(s.tokens) for s in step.sequences) + short[len(taken)].pending > limits.chunk_tokens

    run.see = see
    run.act(actions)
    run.finish()


@given(st.sampled_from(ANY), ACTIONS)
def test_nothing_is_computed_twice_but_for_preempted_requests(limits: CoreLimits, actions: Actions) -> None:
    run = Run(limits)
    run.act([action for action in actions if action[0] not in ("fail", "bad", "abort_out")])
    run.finish()
    computed = sum(request.computed - request.cached_tokens for request in run.requests)
    assert run.worker.computed == computed or run.core.preempted > 0


@given(st.sampled_from(ANY), ACTIONS)
def test_a_dead_worker_ends_everybody_once_and_nothing_stays_cached(limits: CoreLimits, actions: Actions) -> None:
    run = Run(limits)
    run.act(actions)
    run.core.plan(1.0)
    failed = [request.sequence for request in run.core.fail_all()]
    assert sorted([*failed, *run.over]) == list(range(len(run.requests)))
    assert run.core.pages.free == limits.pages
    assert run.core.pages.states.free == limits.state_slots
    assert run.core.waiting == run.core.running == 0


@given(st.sampled_from(ANY), ACTIONS)
def test_a_flush_leaves_what_a_start_does_once_all_have_ended(limits: CoreLimits, actions: Actions) -> None:
    """Before that it changes nothing, nor while the step of one that has left is out."""
    run = Run(limits, audited=True)
    run.act(actions)
    assert run.core.flush() == (len(run.over) == len(run.requests))
    run.check()
    run.finish()
    run.submit([1] * 9, 2)
    step = run.core.plan(1.0)
    assert step
    run.abort(len(run.requests) - 1)
    assert not run.core.flush()
    run.core.apply(run.worker.run(step), 2.0)
    assert run.core.flush()
    run.check()
    assert run.core.pages.free == limits.pages and run.core.pages.states.free == limits.state_slots


def steps(core: Core) -> Iterator[RunStep]:
    worker = PagedWorker(4)
    while step := core.plan(0.0):
        yield step
        core.apply(worker.run(step), 0.0)


def sizes(core: Core) -> list[tuple[str, list[int]]]:
    return [(s.mode, [len(q.tokens) for q in s.sequences]) for s in steps(core)]


def test_a_long_prompt_stalls_an_answer_by_one_chunk_at_a_time() -> None:
    core = Core(LIMITS)
    core.submit(make_request(0, 1, 9))
    core.submit(make_request(1, 40, 1))
    kinds = ["decode" if s.mode == "decode" else "prefill" for s in steps(core)]
    busy = kinds[: len(kinds) - kinds[::-1].index("prefill")]
    assert busy.count("prefill") == 6  # [1], then five chunks of 8
    assert "prefill,prefill" not in ",".join(busy)


def test_short_prompts_share_a_chunk_which_streams_beyond_the_threshold() -> None:
    core = Core(LIMITS)
    for sequence, prompt in enumerate([2, 3]):
        core.submit(make_request(sequence, prompt, 1))
    assert sizes(core) == [("demand", [2, 3])]
    for sequence, prompt in enumerate([2, 3, 1, 3], 2):
        core.submit(make_request(sequence, prompt, 1))
    assert sizes(core) == [("streamed", [2, 3, 1]), ("demand", [3])]


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one() -> None:
    core = Core(LIMITS)
    core.submit(make_request(0, 30, 1))
    core.submit(make_request(1, [99] * 5, 2))
    assert sizes(core) == [
        ("demand", [5]),
        ("decode", [1]),
        ("streamed", [8]),
        ("streamed", [8]),
        ("streamed", [8]),
        ("streamed", [6]),
    ]


def test_who_becomes_short_stands_behind_those_that_were() -> None:
    """The last request is short at once, the one before when the second has computed what both begin with."""
    run, served = Run(), list[list[int]]()
    run.see = lambda step: served.append([s.sequence for s in step.sequences])
    run.submit([1] * 5, 1)
    run.step()
    for prompt in ([2] * 9, [2] * 10, [3] * 5):
        run.submit(prompt, 1)
    run.finish()
    assert served == [[0], [1], [3, 2], [1]]


def test_a_new_turn_prefills_what_is_new_and_less_than_a_page_of_what_is_not() -> None:
    limits = CoreLimits(pages=520, page_tokens=16, max_running=2, demand_tokens=66, chunk_tokens=4096)
    run = Run(limits)
    run.submit([i % 97 for i in range(8000)], 20)
    run.finish()
    history = run.requests[0].tokens
    run.submit(history + [3] * 50, 1)
    turn = run.requests[1]
    step = run.core.plan(0.0)
    assert step and step.mode == "demand"
    (part,) = step.sequences
    assert part.start == 8016 and part.start + len(part.tokens) == 8020 + 50
    run.core.apply(run.worker.run(step), 0.0)
    assert turn.cached_tokens == run.core.cached_tokens == 8016


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_the_same_prompt_again_computes_at_least_its_last_token(length: int) -> None:
    run = Run()
    for _ in range(2):
        run.submit(list(range(length)), 1)
        run.finish()
    again = run.usages[1]
    assert again.cached_tokens == (length - 1) // 4 * 4
    assert run.tokens[0] == run.tokens[1] == answer(list(range(length)), 1)


def test_who_arrives_together_prefills_the_common_prefix_once() -> None:
    """The second one was admitted when nothing was cached; it looks again when it is its turn."""
    run = Run()
    prompt = list(range(24))
    for last in (90, 91):
        run.submit([*prompt, last], 1)
    run.finish()
    assert [request.cached_tokens for request in run.requests] == [0, 24]


def test_who_does_not_fit_waits_for_pages_and_nobody_overtakes() -> None:
    core = Core(LIMITS)  # 96 tokens
    core.submit(make_request(0, 60, 4))
    big, small = make_request(1, 60, 4), make_request(2, 1, 1)
    assert core.would_wait(big)
    core.submit(big)
    assert core.would_wait(small)
    core.submit(small)
    assert (core.running, core.waiting) == (1, 2)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("places", [1, 2, 4, 6, 9])
@pytest.mark.parametrize("pages", [15, 20, 21, 22, 23, 60])
@pytest.mark.parametrize("length", [4, 9, 13])
def test_as_many_answers_to_one_prompt_wait_as_is_foretold(length: int, pages: int, places: int, cache: bool) -> None:
    """Or two more, since in the meantime the two that run have grown by a page each."""
    limits = CoreLimits(pages, 4, max_running=places, demand_tokens=8, chunk_tokens=64, prefix_cache=cache)
    core, worker = Core(limits), PagedWorker(4)
    core.submit(make_request(0, [99] * 10, 20))
    first, *others = [make_request(sequence, length, 20) for sequence in range(1, 7)]
    foretold = core.would_wait(first, 6)
    core.hold(others)
    core.submit(first)
    assert core.waiting == 5 + (foretold == 6)
    assert places > 7 or core.would_wait(make_request(9, 1, 1)) == 1, "held ones go before"
    for _ in range(2):
        step = core.plan(0.0)
        assert step
        core.apply(worker.run(step), 0.0)
    for request in others:
        core.submit(request)
    assert foretold <= core.waiting <= foretold + (2 if pages < 60 else 0)


def test_who_is_admitted_leaves_each_running_request_a_page_to_grow() -> None:
    run = Run(CoreLimits(pages=3, page_tokens=4, max_running=2, demand_tokens=8, chunk_tokens=8))
    run.submit([1] * 4, 8)
    while len(run.tokens.get(0, [])) < 3:
        run.step()
    assert (run.core.pages.available, run.core.pages.cost([2] * 3)) == (1, 1)
    assert run.core.would_wait(make_request(1, [2] * 3, 1))


def test_a_request_without_logits_ends_alone_and_what_it_computed_is_not_reused() -> None:
    run = Run()
    for first in (1, 2):
        run.submit([first] * 5, 2)
    for _ in range(2):
        step = run.core.plan(0.0)
        assert step
        done = run.worker.run(step)
        bad = [-1 if s.sequence == 0 else token for s, token in zip(step.sequences, done.tokens, strict=True)]
        replies = run.core.apply(StepDone(bad, done.stats), 0.0)
    assert [type(reply.message) for reply in replies] == [Tokens]
    assert (run.core.running, run.core.pages.reusable([1] * 6), run.core.pages.reusable([2] * 6)) == (1, 0, 4)


@pytest.mark.parametrize("length", [5, 8, 9, 30])
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_what_made_one_request_fail_makes_no_later_one_fail(length: int, leaves: bool) -> None:
    """Its first chunk goes wrong, which shows with the last one only; also if its client leaves meanwhile."""
    run = Run(audited=True, tells=False)
    prompt = list(range(length))
    run.submit(prompt, 2)
    run.step(bad=0)
    while run.requests[0].computed and run.requests[0].pending > LIMITS.chunk_tokens:
        run.step()
    if 0 not in run.over:
        run.step(abort=0 if leaves else None)
    assert 0 in run.over and run.core.pages.free == LIMITS.pages
    run.submit(prompt, 2)
    run.finish()
    assert run.tokens == {1: answer(prompt, 2)}


def test_a_chunk_that_is_not_finite_ends_its_request_before_anybody_can_reuse_it() -> None:
    """Of a long prompt the second chunk: the rest is not computed, and what begins like it fails no more."""
    run = Run(audited=True)
    prompt = list(range(40))
    run.submit(prompt, 2)
    run.step()
    run.step(bad=0)
    assert run.over == {0: "failed"} and run.worker.computed == 16 and run.core.pages.free == LIMITS.pages
    run.submit([*prompt[:16], 90], 2)
    run.finish()
    assert run.tokens == {1: answer([*prompt[:16], 90], 2)}


def test_bad_logits_take_nothing_from_those_that_share_the_prefix() -> None:
    run = Run(audited=True)
    prefix = list(range(16))
    run.submit([*prefix, 90], 8)
    for _ in range(4):
        run.step()
    run.submit([*prefix, 91, 92], 2)
    while 1 not in run.over:
        run.step(bad=-1)
        run.check()
    assert run.over == {1: "failed"} and run.core.pages.reusable([*prefix, 93]) == 16
    run.finish()
    assert run.tokens == {0: answer([*prefix, 90], 8)}


def test_answers_that_outgrow_the_pages_are_preempted_youngest_first_and_not_time_and_again() -> None:
    run = Run(CoreLimits(pages=16, page_tokens=4, max_running=4, demand_tokens=8, chunk_tokens=8), audited=True)
    for first in range(4):
        run.submit([first] * 4, 48)  # 13 pages each in the end
    seen = 0
    while run.step():
        run.check()
        if run.core.preempted > seen:
            seen = run.core.preempted
            assert run.requests[0].phase != "waiting"
    assert 3 <= run.core.preempted <= 6
    assert [run.tokens[i] for i in range(4)] == [answer([i] * 4, 48) for i in range(4)]
    assert run.worker.computed <= 4 * 51 * 2, "little is computed again"


def test_a_preempted_request_takes_up_its_own_pages_where_they_are_still_there() -> None:
    """And is told of no cached tokens, since it has computed them all itself."""
    run = Run(CoreLimits(pages=16, page_tokens=4, max_running=2, demand_tokens=8, chunk_tokens=8))
    run.submit([1] * 4, 33)  # 10 pages in the end
    run.submit([2] * 24, 20)  # 11
    run.finish()
    assert run.core.preempted == 1
    assert run.core.cached_tokens == 0
    assert run.worker.computed < 36 + 43 + 24, "its prompt is not computed twice"


def test_places_and_pages_of_an_aborted_request_come_back_with_the_step_that_is_out() -> None:
    run = Run(CoreLimits(pages=10, page_tokens=4, max_running=1, demand_tokens=8, chunk_tokens=8))
    run.submit([1] * 20, 4)
    run.submit([2] * 20, 4)
    assert (run.core.running, run.core.waiting) == (1, 1)
    run.step(abort=0)
    assert (run.core.running, run.core.waiting) == (1, 0)
    assert run.core.pages.own == 0, "what it had is free, the next one has not begun"


@pytest.mark.parametrize("misses", [0, 1, 7, 128])
def test_usage_of_all_requests_adds_up_to_the_counters(misses: int) -> None:
    run = Run(misses=misses)
    for first, (prompt, new) in enumerate([(3, 2), (2, 4), (20, 1)]):
        run.submit([first] * prompt, new)
    run.finish()
    counters = run.core.counters.values()
    assert sum(u.expert_misses for u in run.usages) == sum(c.misses for c in counters)
    assert sum(u.expert_hits for u in run.usages) == sum(c.hits for c in counters)
    assert sum(u.copied_nbytes for u in run.usages) == sum(c.copied_nbytes for c in counters)
    assert all(u.copied_nbytes == u.expert_misses * RECORD_NBYTES for u in run.usages)
