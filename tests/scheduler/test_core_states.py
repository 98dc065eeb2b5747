"""The core loop of a model with recurrent state, by cases; in random histories it is tested in test_core.py.

Answers are those of a made-up worker whose state is the tuple of the tokens that it has taken in.
"""

import pytest
from msgspec.structs import replace

from scheduler.core import CoreLimits
from tests.scheduler.paged_worker import answer, path
from tests.scheduler.test_core import Run, make_request
from worker.protocol import RunStep

LIMITS = CoreLimits(pages=64, page_tokens=4, max_running=3, demand_tokens=5, chunk_tokens=8, state_slots=11)
PREFIX = list(range(16))


def served(run: Run, prompt: list[int], new_tokens: int = 1) -> int:
    """Tokens of `prompt` that were cached, once it is answered, rightly, with all there is looked through."""
    run.submit(prompt, new_tokens)
    run.finish()
    number = len(run.requests) - 1
    assert run.tokens[number] == answer(prompt, new_tokens)
    return run.requests[number].cached_tokens


def snapshots(run: Run) -> int:
    return run.core.pages.states.snapshots


def kept(run: Run) -> list[list[int]]:
    """The tokens of the prefixes that have a snapshot."""
    return [path(node) for node in run.core.pages._cache.nodes() if node.snapshot and node.snapshot.usable]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 13, 30])
def test_the_same_prompt_again_reuses_what_it_does_without_a_state(length: int) -> None:
    run = Run(LIMITS, audited=True)
    prompt = list(range(length))
    assert [served(run, prompt), served(run, prompt)] == [0, (length - 1) // 4 * 4]


@pytest.mark.parametrize("length", [4, 5, 7, 8, 18])
@pytest.mark.parametrize("new", [1, 2, 4, 5, 9])
def test_the_next_turn_reuses_what_it_does_without_a_state(length: int, new: int) -> None:
    cached = []
    for state_slots in (0, LIMITS.state_slots):
        run = Run(replace(LIMITS, state_slots=state_slots), audited=True)
        served(run, list(range(length)), new)
        cached.append(served(run, [*run.requests[0].tokens, 90, 91]))
    assert cached == [(length + new - 1) // 4 * 4] * 2


def test_whoever_leaves_a_prefix_first_computes_it_and_makes_the_snapshot_where_it_does() -> None:
    run = Run(replace(LIMITS, chunk_tokens=64), audited=True)
    assert served(run, [*PREFIX, *[70] * 9]) == 0
    assert served(run, [*PREFIX, *[71] * 9]) == 0, "no snapshot was where they part"
    assert served(run, [*PREFIX, *[72] * 9]) == 16
    assert served(run, [*PREFIX, *[71] * 8, 5]) == 24, "its own one is still there"


def test_answers_to_one_prompt_all_start_from_its_snapshot() -> None:
    """In one step, from one slot."""
    run, prompt = Run(LIMITS, audited=True), [*PREFIX, 70]
    run.submit(prompt, 9)
    while not run.tokens:
        run.step()
    for _ in range(2):
        run.submit(prompt, 9)
    restores = list[tuple[int, list[int]]]()
    run.see = lambda step: restores.extend((s.restore, s.tokens) for s in step.sequences if s.restore >= 0)
    run.finish()
    assert [tokens for _, tokens in restores] == [[70], [70]] and len({slot for slot, _ in restores}) == 1
    assert [run.tokens[i] for i in range(3)] == [answer(prompt, 9)] * 3
    assert [request.cached_tokens for request in run.requests] == [0, 16, 16]


def test_who_arrives_together_computes_the_common_prefix_once() -> None:
    run = Run(LIMITS, audited=True)
    for last in (70, 71):
        run.submit([*PREFIX, last], 2)
    run.finish()
    assert [request.cached_tokens for request in run.requests] == [0, 16]
    assert [run.tokens[i] for i in range(2)] == [answer([*PREFIX, last], 2) for last in (70, 71)]


def test_an_answer_keeps_one_snapshot_that_moves_along() -> None:
    run = Run(LIMITS, audited=True)
    run.submit([*PREFIX, 70], 40)
    seen = set[int]()
    while run.step():
        run.check()
        seen.add(snapshots(run))
    assert seen == {1, 2} and snapshots(run) == 2, "the moving one, and the prompt's"


def test_with_no_slot_to_spare_a_turn_goes_on_in_the_slot_of_the_snapshot() -> None:
    """Of two slots one is the other request's, and the turn's state is in the one snapshot."""
    run = Run(replace(LIMITS, max_running=2, state_slots=2), audited=True)
    assert served(run, [*PREFIX, 70], 8) == 0
    turn = [*run.requests[0].tokens, 80]
    run.submit([50] * 3, 30)
    run.step()
    steps = list[RunStep]()
    run.see = steps.append
    assert served(run, turn, 2) == 24
    (first,) = [s for step in steps for s in step.sequences if s.sequence == 2 and s.start == 24]
    assert (first.restore, first.tokens) == (-1, [*turn[24:]])
    assert run.tokens[1] == answer([50] * 3, 30)


def test_the_snapshot_least_recently_used_makes_way() -> None:
    """Each prompt of 5 tokens leaves one; four slots are left beside the request's own."""
    run = Run(replace(LIMITS, max_running=1, state_slots=5), audited=True)
    prompts = [[first] * 5 for first in range(1, 6)]
    for prompt in prompts[:4]:
        served(run, prompt)
    assert served(run, prompts[0]) == 4
    served(run, prompts[4])
    assert [run.core.pages.reusable(prompt) for prompt in prompts] == [4, 0, 4, 4, 4]


def test_a_snapshot_goes_with_its_page() -> None:
    run = Run(replace(LIMITS, pages=8, max_running=1), audited=True)
    served(run, [1] * 9)
    assert snapshots(run) == 1
    served(run, [2] * 30)
    assert run.core.pages.reusable([1] * 9) == 0
    assert {len(path) for path in kept(run)} == {24, 28}, "of the second one's last two chunks"
    assert run.core.pages.states.free == LIMITS.state_slots - 2


def test_a_preempted_request_goes_on_from_its_own_snapshot() -> None:
    limits = CoreLimits(pages=16, page_tokens=4, max_running=2, demand_tokens=8, chunk_tokens=8, state_slots=8)
    run = Run(limits, audited=True)
    run.submit([1] * 4, 33)  # 10 pages in the end
    run.submit([2] * 24, 20)  # 11
    run.finish()
    assert run.core.preempted == 1 and run.core.cached_tokens == 0
    assert run.worker.computed < 36 + 43 + 24, "its prompt is not computed twice"
    assert [run.tokens[i] for i in range(2)] == [answer([1] * 4, 33), answer([2] * 24, 20)]


@pytest.mark.parametrize("state_slots", [3, 11])
@pytest.mark.parametrize("out", [False, True], ids=["between steps", "while one is out"])
def test_an_aborted_long_prompt_goes_on_where_its_last_chunk_ended(out: bool, state_slots: int) -> None:
    run = Run(replace(LIMITS, state_slots=state_slots), audited=True)
    prompt = list(range(60))
    run.submit(prompt, 1)
    for _ in range(3):
        run.step()
    if out:
        run.step(abort=0)
    else:
        run.abort(0)
    assert served(run, prompt) == 24


@pytest.mark.parametrize("leaves", [False, True], ids=["fails", "fails after its client has left"])
def test_a_step_that_fails_leaves_no_snapshot(leaves: bool) -> None:
    """And takes none that was there before."""
    run = Run(LIMITS, audited=True)
    assert served(run, [*PREFIX, 70]) == 0
    kept = snapshots(run)
    run.submit([*PREFIX, *[71] * 7], 4)
    run.step(abort=1 if leaves else None, fail=True)
    assert snapshots(run) == kept and run.over[1] == ("abort" if leaves else "failed")
    assert run.core.pages.states.available == LIMITS.state_slots
    assert served(run, [*PREFIX, *[71] * 7], 4) == 16


def test_what_an_aborted_request_had_written_does_not_count() -> None:
    """Its step comes back well, but nobody has its KV."""
    run = Run(LIMITS, audited=True)
    run.submit([1] * 9, 4)
    run.step(abort=0)
    assert snapshots(run) == 0 and run.core.pages.states.free == LIMITS.state_slots


@pytest.mark.parametrize("length", [5, 8, 9, 30])
def test_no_snapshot_of_a_request_without_logits_is_used_again(length: int) -> None:
    """Its state went wrong in its first chunk, which shows with the last one only."""
    run = Run(LIMITS, audited=True, tells=False)
    prompt = list(range(length))
    run.submit(prompt, 2)
    run.step(bad=0)
    run.finish()
    assert run.over == {0: "failed"} and snapshots(run) == 0
    assert run.core.pages.states.free == LIMITS.state_slots
    assert served(run, prompt, 2) == 0


def test_a_bad_state_that_others_have_computed_on_from_is_not_started_from_again() -> None:
    """Two clients leave before anything shows, and what they have cached stays; the third one's request fails."""
    run = Run(LIMITS, audited=True, tells=False)
    run.submit([*PREFIX, *[70] * 20], 1)
    run.step(bad=0)
    run.step()
    run.abort(0)
    assert kept(run) == [PREFIX]
    run.submit([*PREFIX, *[71] * 20], 1)
    run.step()
    run.abort(1)
    run.submit([*PREFIX, *[72] * 4], 2)
    run.finish()
    assert run.over[2] == "failed" and PREFIX not in kept(run)
    assert run.core.pages._cache.longest([*PREFIX, 73]).depth == 4, "its pages are there"
    assert served(run, [*PREFIX, *[72] * 4], 2) == 0


def test_a_place_that_comes_free_before_its_slot_is_taken_with_the_slot() -> None:
    """The one that runs leaves while its step is out: its slot is the worker's until that is back."""
    run = Run(replace(LIMITS, max_running=1, state_slots=1), audited=True)
    run.submit([1] * 20, 4)
    run.submit([2] * 20, 4)
    step = run.core.plan(0.0)
    assert step
    run.abort(0)
    assert (run.core.running, run.core.waiting) == (0, 1)
    assert run.core.would_wait(make_request(9, 1, 1))
    run.core.apply(run.worker.run(step), 0.0)
    assert (run.core.running, run.core.waiting) == (1, 0)
    run.finish()
    assert run.tokens == {1: answer([2] * 20, 4)}


def test_without_a_prefix_cache_no_snapshot_is_made() -> None:
    run = Run(replace(LIMITS, prefix_cache=False), audited=True)
    assert [served(run, PREFIX, 9), served(run, PREFIX, 9)] == [0, 0]
    assert run.core.pages.states.free == LIMITS.state_slots


def test_slots_are_free_once_the_worker_is_gone() -> None:
    run = Run(LIMITS, audited=True)
    served(run, [*PREFIX, 70], 9)
    run.submit([*PREFIX, 71], 9)
    run.core.plan(0.0)
    run.core.fail_all()
    assert run.core.pages.states.free == LIMITS.state_slots and snapshots(run) == 0


def test_a_slot_that_a_step_writes_is_waited_for() -> None:
    """Also when nobody has ended by then: it is a snapshot now, and makes way."""
    run = Run(replace(LIMITS, state_slots=3), audited=True)
    run.submit([1] * 3, 9)
    run.step()
    step = run.core.plan(0.0)
    assert step and step.mode == "decode" and [at for at, _ in step.sequences[0].snapshots] == [4]
    assert run.core.would_wait(make_request(9, 1, 1), 2) == 1, "there are two places and one slot"
    held = make_request(8, 1, 1)
    run.core.hold([held])
    assert run.core.would_wait(make_request(9, 1, 1)) == 1, "who is held will have it"
    run.core.drop(held)
    for first in (2, 3):
        run.submit([first] * 5, 4)
    assert (run.core.running, run.core.waiting) == (2, 1)
    run.core.apply(run.worker.run(step), 0.0)
    assert (run.core.running, run.core.waiting) == (3, 0)


def test_an_answer_moves_its_own_snapshot_rather_than_take_that_of_another() -> None:
    run = Run(replace(LIMITS, max_running=1, state_slots=3), audited=True)
    served(run, [1] * 5)
    served(run, [2] * 3, 30)
    assert served(run, [1] * 5) == 4


def test_a_bad_state_is_not_left_behind_on_the_page_of_another_request() -> None:
    """The second one computes two pages again, since no snapshot is behind them, and makes one, which is wrong."""
    run = Run(LIMITS, audited=True, tells=False)
    run.submit([*PREFIX, *[70] * 4], 20)
    while not run.tokens:
        run.step()
    run.submit([*PREFIX[:8], *[71] * 12], 2)
    run.step()
    assert not run.requests[1].begun and PREFIX[:8] not in kept(run)
    run.step(bad=0)
    assert run.requests[1].begun and PREFIX[:8] in kept(run)
    while 1 not in run.over:
        run.step()
    assert run.over == {1: "failed"} and PREFIX[:8] not in kept(run)
    assert served(run, [*PREFIX[:8], *[71] * 12], 2) == 0
    assert run.tokens[0] == answer([*PREFIX, *[70] * 4], 20)
