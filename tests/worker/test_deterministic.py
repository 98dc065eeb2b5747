"""Built of operations with a fixed order of sums, a model gives a position one set of bits, whatever shares its step.

Every family's tiny checkpoint, all experts resident: final hidden states, logits and KV of every position, as equality,
of a prompt in one step against chunks, decode steps and batches. A model of the other kind does not pass, which shows
that what is compared can differ.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from copyengine.protocol import Dtype
from tests.worker.resident_experts import resident_runner
from tests.worker.transformers_oracle import CASES, RECURRENT
from worker.protocol import Mode, RunStep, Sampling, SequenceStep
from worker.step import FullResult, StepRunner

TOKENS, VOCAB, PAGE_TOKENS = 150, 199, 16
OTHERS = [53, 66, 79, 92, 105, 118]
"""Tokens of those beside a prompt."""
DECODED = 12
"""Of the last tokens, one by one."""
TOGETHER = 8
"""Sequences of a batch."""


CASE = "e128_k8_sharded"
VARIANTS = {name for name in CASES if name.endswith(("_mixed", "_otherwise", "_windows", "_text", "layer_between"))}
VARIANTS |= {"e8_k1", "every_second_layer", "yarn"}
"""Of families of which another case is run each time."""
IN_BFLOAT16 = ("e60_k2_tied", "qwen3_next", "gpt_oss", "deepseek_v3")
"""Cases that are run in bfloat16 each time: of every kind of attention."""


class Sequences:
    """TOGETHER sequences of `tokens` tokens, whose pages are mixed; sequence i has state slot i."""

    def __init__(self, runner: StepRunner, case: str, tokens: int = TOKENS, others: Sequence[int] = OTHERS) -> None:
        """`others` are the lengths of what is computed beside the first one."""
        self.runner, self.tokens, self.others, self.recurrent = runner, tokens, others, case in RECURRENT
        pages = -(-tokens // PAGE_TOKENS)
        mixed = np.random.default_rng(1).permutation(TOGETHER * pages)
        self._pages = mixed.reshape(TOGETHER, pages).tolist()
        self.ids = np.random.default_rng(2).integers(0, VOCAB, (TOGETHER, tokens)).tolist()

    def part(self, number: int, first: int, last: int, place: int | None = None) -> SequenceStep:
        """Tokens of sequence `number`, which lies where sequence `place` would."""
        place = number if place is None else place
        used = self._pages[place][: -(-last // PAGE_TOKENS)]
        state = place if self.recurrent else -1
        return SequenceStep(place, self.ids[number][first:last], first, used, Sampling(), state)

    def run(self, mode: Mode, *parts: SequenceStep) -> FullResult:
        return self.runner.run_full(RunStep(mode, list(parts)))

    def in_chunks(self, cuts: Sequence[int], mode: Mode = "demand", number: int = 0) -> list[torch.Tensor]:
        """Hidden states and logits, and keys and values, of a sequence whose steps end at `cuts`."""
        steps = [self.run(mode, self.part(number, *cut)) for cut in pairwise([0, *cuts])]
        return [
            *(torch.cat(rows) for rows in zip(*((s.hidden, s.logits) for s in steps), strict=True)),
            *self.kv(number),
        ]

    def kv(self, place: int) -> list[torch.Tensor]:
        """Copies of what the sequence's pages hold."""
        layers = self.runner._kv.layers
        return [
            kept[self._pages[place]].flatten(0, 1)[: self.tokens] for layer in layers for kept in (layer.k, layer.v)
        ]


def assert_same_bits(ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for mine, reference in zip(ours, expected, strict=True):
        assert reference.isfinite().all() and torch.equal(mine.view(torch.uint8), reference.view(torch.uint8))


def on_host(directory: Path, case: str, dtype: Dtype, deterministic: bool = True) -> Sequences:
    """All experts resident, in groups of three."""
    pages = TOGETHER * -(-TOKENS // PAGE_TOKENS)
    path = str(directory / case)
    return Sequences(resident_runner(path, dtype, pages, PAGE_TOKENS, 3, TOGETHER, deterministic), case)


def cuts_of(sequences: Sequences) -> list[list[int]]:
    """Ends of steps: every 64; and where a state does not begin anew with each of them, of 1 to 17 tokens too."""
    last = sequences.tokens
    by_64 = [*range(64, last, 64), last]
    if sequences.recurrent:
        return [by_64]
    ends = np.random.default_rng(3).integers(1, 18, last).cumsum().tolist()
    return [by_64, [*(end for end in ends if end < last), last]]


def every_way(sequences: Sequences) -> None:
    last = sequences.tokens
    whole = sequences.in_chunks([last], "streamed")
    for cuts in cuts_of(sequences):
        assert_same_bits(sequences.in_chunks(cuts), whole)
    # Beside others, whose rows come before and behind its own, in another place.
    others = [sequences.part(i, 0, tokens) for i, tokens in enumerate(sequences.others, 1)]
    batch = sequences.run("demand", *others[:3], sequences.part(0, 0, last, place=TOGETHER - 1), *others[3:])
    first = sum(len(part.tokens) for part in others[:3])
    rows = [part[first : first + last] for part in (batch.hidden, batch.logits)]
    assert_same_bits([*rows, *sequences.kv(TOGETHER - 1)], whole)
    decode(sequences, None if sequences.recurrent else whole)


def decode(sequences: Sequences, whole: Sequence[torch.Tensor] | None) -> None:
    """Alone and beside seven others at other positions: equal, and equal to those of the prefill, if that is given."""
    start = sequences.tokens - DECODED
    for number in range(TOGETHER):
        sequences.run("demand", sequences.part(number, 0, start - number))
    for position in range(start, sequences.tokens):
        parts = [sequences.part(n, position - n, position - n + 1) for n in range(TOGETHER)]
        state = sequences.runner._states
        before = state._slots.clone() if state else None
        alone = sequences.run("decode", parts[0])
        if state and before is not None:
            state._slots.copy_(before)
        beside = sequences.run("decode", *parts[4:], *parts[:4])
        assert_same_bits([beside.hidden[4:5], beside.logits[4:5]], [alone.hidden, alone.logits])
        if whole is not None:
            expected = [part[position : position + 1] for part in whole]
            kv = [part[position : position + 1] for part in sequences.kv(0)]
            assert_same_bits([alone.hidden, alone.logits, *kv], expected)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in VARIANTS else case for case in CASES]
)
def test_bits_of_a_position_do_not_depend_on_its_step(case: str, dtype: Dtype, goldens: Path) -> None:
    every_way(on_host(goldens, case, dtype))


@pytest.mark.parametrize(
    "case", [case if case in IN_BFLOAT16 else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_nor_do_those_of_bfloat16(case: str, goldens: Path) -> None:
    every_way(on_host(goldens, case, "bfloat16"))


@pytest.mark.parametrize("threads", [2, 3])
def test_with_more_compute_threads(threads: int, goldens: Path) -> None:
    """Each number of them may give bits of its own: MKL cuts narrow products by it (found at 24 columns from 3 on)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        every_way(on_host(goldens, "deepseek_v3", "float32"))
    finally:
        torch.set_num_threads(before)


def test_bits_of_the_fastest_operations_do(goldens: Path) -> None:
    """What is compared above can differ: with a model of the other kind it does."""
    with pytest.raises(AssertionError):
        every_way(on_host(goldens, CASE, "float32", deterministic=False))
