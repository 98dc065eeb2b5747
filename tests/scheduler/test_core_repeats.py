"""Answers of a model with recurrent state repeat bit for bit, whatever else is served: against the same request alone.

Over a made-up worker whose every number depends on the cuts of its sequence, as a real model's last bits do.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from scheduler.core import CoreLimits
from scheduler.request import Request
from tests.scheduler.cut_worker import CutWorker
from tests.scheduler.test_core import ACTIONS, LIMITS, SCARCE, Actions, Run
from worker.protocol import RunStep

PIECE = 8
ALONE = CoreLimits(
    pages=64, page_tokens=4, max_running=1, demand_tokens=0, chunk_tokens=64, prefix_cache=False, state_slots=1,
    cut_tokens=PIECE,
)  # fmt: skip
EXACT = [
    replace(limits, chunk_tokens=chunk, state_slots=limits.max_running + snapshots, cut_tokens=PIECE)
    for limits, chunk, snapshots in zip(SCARCE, (8, 9, 15, 16, 23, 64), (12, 3, 1, 6, 0, 12), strict=True)
]


def cut_run(limits: CoreLimits) -> Run:
    run = Run(limits)
    run.worker = CutWorker(limits.page_tokens, PIECE)  # type: ignore[assignment]
    return run


def alone(request: Request) -> list[int]:
    """Its whole answer, by itself, with its prompt in one chunk."""
    run = cut_run(ALONE)
    run.submit(request.tokens[: request.prompt_tokens], request.max_tokens)
    run.finish()
    return run.tokens[0]


def check_answers(run: Run) -> None:
    for request in run.requests:
        tokens, wanted = run.tokens.get(request.sequence, []), alone(request)
        assert tokens == (wanted if run.over[request.sequence] == "length" else wanted[: len(tokens)])


@settings(max_examples=300)
@given(st.sampled_from(EXACT), ACTIONS)
def test_every_answer_is_that_of_the_request_alone(limits: CoreLimits, actions: Actions) -> None:
    """In any company, over cached prefixes, preempted, beside steps that fail and clients that leave."""
    run = cut_run(limits)
    run.act(actions)
    run.finish()
    check_answers(run)


@given(st.sampled_from(EXACT), ACTIONS)
def test_states_are_kept_and_prompts_cut_at_multiples_alone(limits: CoreLimits, actions: Actions) -> None:
    run = cut_run(limits)

    def see(step: RunStep) -> None:
        for (request, count), part in zip(run.core._out, step.sequences, strict=True):
            assert not any(position % PIECE or position > request.prompt_tokens for position, _ in part.snapshots)
            if request.computed < request.prompt_tokens:
                assert request.computed % PIECE == 0
                assert (part.start + count) % PIECE == 0 or part.start + count == request.prompt_tokens

    run.see = see
    run.act(actions)
    run.finish()


def served(run: Run, prompt: list[int], new_tokens: int = 3) -> int:
    """Tokens of `prompt` that were cached, once it is answered as it is alone."""
    run.submit(prompt, new_tokens)
    run.finish()
    check_answers(run)
    return run.requests[-1].cached_tokens


ROOMY = replace(LIMITS, pages=64, chunk_tokens=16, state_slots=20, cut_tokens=PIECE)


@pytest.mark.parametrize(("length", "cached"), [(7, 0), (8, 0), (9, 8), (16, 8), (17, 16), (40, 32)])
def test_the_same_prompt_again_is_reused_up_to_a_multiple(length: int, cached: int) -> None:
    run = cut_run(ROOMY)
    assert [served(run, list(range(length))) for _ in range(2)] == [0, cached]


def test_the_next_turn_reuses_the_prompt_and_nothing_of_the_answer() -> None:
    run = cut_run(ROOMY)
    assert served(run, list(range(16)), 30) == 0
    turn = [*run.requests[0].tokens, 50, 51]
    assert served(run, turn) == 16
    assert served(run, turn) == (len(turn) - 1) // PIECE * PIECE, "it is a prompt now"


def test_prompts_that_part_within_a_piece_share_what_is_before_it() -> None:
    run = cut_run(ROOMY)
    common = list(range(21))
    assert [served(run, [*common, *[way] * 9]) for way in (70, 71, 72)] == [0, 16, 16]


def test_who_is_preempted_takes_no_state_of_its_answer_from_a_prompt() -> None:
    """The older one's prompt has the answer in it, and has left its states when the younger one is admitted again."""
    prompt = list(range(8))
    one = cut_run(ROOMY)
    one.submit(prompt, 30)
    one.finish()
    run = cut_run(replace(ROOMY, pages=14, max_running=2))
    run.submit([*prompt, *one.tokens[0][:16]], 14)
    run.submit(prompt, 30)
    while 0 not in run.over:
        run.step()
    assert run.core.preempted == 1 and run.requests[1].new_tokens > 9
    assert run.core.pages.reusable(run.requests[1].tokens) == 16, "there are states within its answer"
    run.finish()
    assert run.tokens[1] == one.tokens[0]
    check_answers(run)


@pytest.mark.parametrize("cut_tokens", [None, 4])
def test_without_the_multiples_answers_do_depend_on_company(cut_tokens: int | None) -> None:
    """Or else the tests above would show nothing: a second turn over its own answer, and pieces of another length."""
    run = cut_run(replace(ROOMY, cut_tokens=cut_tokens))
    prompt = list(range(13))
    run.submit(prompt, 20)
    run.finish()
    run.submit([*run.requests[0].tokens, 50], 12)
    run.finish()
    assert run.tokens[1] != alone(run.requests[1])
