"""What of recurrent states a step may name, against the protocol's words; test_step tests the rest of the check."""

import pytest
import torch

from copyengine.wire.errors import RequestRefused
from tests.worker.test_step import small_spec
from worker.kv import KvCache
from worker.protocol import RunStep, SequenceStep
from worker.step_check import check_step

STATE_SLOTS = 4


def check(*sequences: SequenceStep, state_slots: int = STATE_SLOTS) -> None:
    spec = small_spec()
    kv = KvCache(spec, 8, 4, torch.float32, torch.device("cpu"))
    check_step(RunStep("demand", list(sequences)), spec, kv, state_slots)


def prefill(
    number: int, state: int, restore: int = -1, snapshots: list[tuple[int, int]] | None = None, start: int = 4
) -> SequenceStep:
    """Four tokens from position `start`, on pages of this sequence's own."""
    pages = [number * 3 + i for i in range(start // 4 + 1)]
    return SequenceStep(number, [1, 2, 3, 4], start, pages, None, state, restore, snapshots or [])


def test_states_restored_and_snapshots_anywhere_in_the_step_go_through() -> None:
    check(prefill(0, 0, 2, [(5, 1)]), prefill(1, 3, 2))
    check(prefill(0, 0, -1, [(5, 1), (8, 2)]), prefill(1, 3, start=0))
    check(prefill(0, -1), state_slots=0)


@pytest.mark.parametrize(
    ("sequences", "said"),
    [
        ([prefill(0, -1)], "state slots must be in 0 .. 3"),
        ([prefill(0, 4)], "state slots must be in 0 .. 3"),
        ([prefill(0, 0, 4)], "state slots must be in 0 .. 3"),
        ([prefill(0, 0, -2)], "state slots must be in 0 .. 3"),
        ([prefill(0, 0, -1, [(5, 4)])], "state slots must be in 0 .. 3"),
        ([prefill(0, 0, -1, [(4, 1)])], "a snapshot must be at positions 5 .. 8, not 4"),
        ([prefill(0, 0, -1, [(9, 1)])], "a snapshot must be at positions 5 .. 8, not 9"),
        ([prefill(0, 0, 1, start=0)], "nothing can be restored at position 0"),
        ([prefill(0, 0), prefill(1, 0)], "written twice"),
        ([prefill(0, 0, -1, [(5, 0)])], "written twice"),
        ([prefill(0, 0, -1, [(5, 1)]), prefill(1, 2, -1, [(5, 1)])], "written twice"),
        ([prefill(0, 0, 1), prefill(1, 1)], "restored from a slot that the step writes"),
        ([prefill(0, 0, 0)], "restored from a slot that the step writes"),
    ],
)
def test_impossible_states_are_refused(sequences: list[SequenceStep], said: str) -> None:
    with pytest.raises(RequestRefused, match=said):
        check(*sequences)


@pytest.mark.parametrize("sequence", [prefill(0, 0), prefill(0, -1, 0), prefill(0, -1, -1, [(5, 0)])])
def test_a_model_without_states_takes_none(sequence: SequenceStep) -> None:
    with pytest.raises(RequestRefused, match="no recurrent state"):
        check(sequence, state_slots=0)
