"""Recurrent states through the real stack: snapshots and restored states against computing from the start.

The checkpoints are transformers' own; logits close to its logits show that what was restored was the right state.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker.model.test_pre_norm import relative_error
from tests.worker.resident_experts import resident_runner
from worker.model.batch import StateRows
from worker.model.gated_delta import _heads
from worker.protocol import Mode, RunStep, Sampling, SequenceStep
from worker.state import StateSlots
from worker.step import FullResult, StepRunner
from worker.step_inputs import on_device, step_arrays

CUT, END = 12, 40
"""Of a prompt of END tokens, CUT are in the first step."""


class Model:
    """A tiny Qwen3-Next with pages of 4 tokens: sequence i has pages 16 i and up."""

    def __init__(self, goldens: Path, case: str = "qwen3_next", group: int = 128) -> None:
        golden = np.load(goldens / f"{case}.npz")
        self.ids: list[int] = golden["ids"].tolist()
        self.logits = golden["logits"]
        self.runner: StepRunner = resident_runner(str(goldens / case), group=group)
        states = self.runner._states
        assert states is not None
        self.states: StateSlots = states

    def part(
        self,
        number: int,
        first: int,
        last: int,
        state: int,
        restore: int = -1,
        keep: list[tuple[int, int]] | None = None,
    ) -> SequenceStep:
        pages = list(range(16 * number, 16 * number - (-last // 4)))
        return SequenceStep(number, self.ids[first:last], first, pages, Sampling(), state, restore, keep or [])

    def run(self, *parts: SequenceStep, mode: Mode = "demand") -> FullResult:
        return self.runner.run_full(RunStep(mode, list(parts)))

    def state(self, slot: int) -> torch.Tensor:
        """Copies of all that slot `slot` holds."""
        return torch.cat([part[slot].reshape(-1) for layer in self.states.layers.values() for part in layer]).clone()

    def error(self, logits: torch.Tensor, first: int) -> float:
        return relative_error(logits, self.logits[first : first + len(logits)])


@pytest.fixture
def model(goldens: Path) -> Model:
    return Model(goldens)


def test_a_restored_state_goes_on_with_the_bits_of_its_own(model: Model) -> None:
    """A snapshot at the end of a step, under which the sequence has gone on, restored over what another slot holds."""
    model.run(model.part(0, 0, CUT, 0, keep=[(CUT, 4)]))
    assert torch.equal(model.state(0), model.state(4))
    own = model.run(model.part(0, CUT, END, 0))
    kept = model.state(4)
    model.run(model.part(1, 0, 30, 1))
    # Of another sequence that shares the pages up to the cut, as one with the same prefix does.
    other = model.run(model.part(0, CUT, END, 1, restore=4))
    assert torch.equal(own.logits, other.logits) and torch.equal(model.state(0), model.state(1))
    assert torch.equal(model.state(4), kept) and model.error(other.logits, CUT) <= 1e-4


def test_snapshots_inside_a_chunk_are_the_states_there(model: Model) -> None:
    """At the convolution's first rows, between them and at the end: each is what a step that ends there leaves, and
    going on from it gives transformers' logits."""
    ends = [1, 2, CUT, 33, END]
    whole = model.run(model.part(0, 0, END, 7, keep=[(end, i) for i, end in enumerate(ends)]))
    assert model.error(whole.logits, 0) <= 1e-4 and torch.equal(model.state(4), model.state(7))
    for i, end in enumerate(ends):
        model.run(model.part(1, 0, end, 6))
        torch.testing.assert_close(model.state(i), model.state(6), rtol=1e-4, atol=1e-5)
        after = model.run(model.part(0, end, len(model.ids), 5, restore=i))
        assert model.error(after.logits, end) <= 1e-4


def test_a_slot_that_was_used_before_starts_from_zeros(model: Model) -> None:
    first = model.run(model.part(0, 0, END, 2))
    assert torch.equal(model.run(model.part(0, 0, END, 2)).logits, first.logits)


def test_decode_restores_and_keeps(model: Model) -> None:
    """A decode step from a snapshot, itself kept after it: the next one from there is that of the sequence's own."""
    model.run(model.part(0, 0, END, 0, keep=[(END, 3)]))
    before = model.state(3)
    own = model.run(model.part(0, END, END + 1, 0), mode="decode")
    other = model.run(model.part(0, END, END + 1, 1, restore=3, keep=[(END + 1, 5)]), mode="decode")
    assert torch.equal(own.logits, other.logits) and torch.equal(model.state(0), model.state(5))
    assert torch.equal(model.state(3), before) and model.error(own.logits, END) <= 1e-4


def test_sequences_of_a_step_keep_their_states_apart(model: Model) -> None:
    """Three prefilled and decoded together, of different lengths, against transformers at every position."""
    lengths = (3, 17, END)
    prefilled = model.run(*(model.part(i, 0, n, 5 - i) for i, n in enumerate(lengths)))
    first = 0
    for n in lengths:
        assert model.error(prefilled.logits[first : first + n], 0) <= 1e-4
        first += n
    for further in range(3):
        parts = [model.part(i, n + further, n + further + 1, 5 - i) for i, n in enumerate(lengths)]
        decoded = model.run(*parts, mode="decode").logits
        for i, n in enumerate(lengths):
            assert model.error(decoded[i : i + 1], n + further) <= 1e-4


def test_states_are_the_same_bits_demand_or_streamed_however_experts_come(goldens: Path) -> None:
    seen = []
    modes: tuple[tuple[Mode, int], ...] = (("demand", 128), ("streamed", 128), ("demand", 3))
    for mode, group in modes:
        model = Model(goldens, group=group)
        model.run(model.part(0, 0, CUT, 0, keep=[(5, 1)]), mode=mode)
        model.run(model.part(0, CUT, END, 0), mode=mode)
        seen.append(torch.cat([model.state(0), model.state(1)]))
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_rows_that_name_no_state_leave_all_as_they_are(model: Model) -> None:
    """As those of a rehearsal, and of a graph's padding."""
    model.run(*(model.part(i, 0, 3, i) for i in range(3)))
    before = [model.state(slot) for slot in range(model.states.count)]
    modes: tuple[Mode, ...] = ("demand", "decode")
    for mode in modes:
        step = RunStep(mode, [SequenceStep(9, [1] if mode == "decode" else [1] * 70, 0, list(range(40, 58)))])
        inputs = on_device(step, step_arrays(step, 4, recurrent=True), torch.device("cpu"))
        assert isinstance(inputs.batch.states, StateRows) == (mode == "decode")
        model.runner._model.hidden(inputs.batch)
    assert all(torch.equal(model.state(slot), state) for slot, state in enumerate(before))


def test_a_copy_is_of_one_slot_alone(model: Model) -> None:
    model.run(model.part(0, 0, 9, 3))
    before = [model.state(slot) for slot in range(model.states.count)]
    model.states.copy(3, 6)
    before[6] = before[3]
    assert before[3].any() and all(torch.equal(model.state(slot), state) for slot, state in enumerate(before))
    assert model.states.nbytes == model.states.count * before[0].nbytes


def test_a_layers_views_have_the_same_strides_for_any_number_of_rows() -> None:
    """Of one row as of eight: what a device's kernels are compiled for must not tell how large a batch is."""
    seen = set()
    for rows in (1, 2, 8):
        mixed, z = torch.split(torch.zeros(rows, 90), [60, 30], dim=1)
        assert torch.equal(_heads(mixed, 6), mixed.reshape(rows, 6, 10))
        seen.add((_heads(mixed, 6).stride(), _heads(z, 3).stride(), _heads(z, 3).storage_offset()))
    assert seen == {((90, 10, 1), (90, 10, 1), 60)}
