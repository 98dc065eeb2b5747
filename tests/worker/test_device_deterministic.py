# mypy: allow-untyped-calls
"""Every family on a GPU, built of operations with a fixed order of sums: one set of bits for each position.

As tests/worker/test_deterministic.py has it of the host, with experts that come and go through the slots: whole, in
chunks, decoded, beside others, and by decode graphs.
"""

from pathlib import Path

import pytest
import torch

from copyengine.checkpoint.model import open_model
from copyengine.protocol import Dtype
from tests.worker.device_model import LONGEST, device_model
from tests.worker.test_deterministic import DECODED, TOGETHER, Sequences, assert_same_bits, every_way
from tests.worker.test_device_families import slots_for
from tests.worker.transformers_oracle import CASES
from worker.protocol import RunStep

pytestmark = pytest.mark.gpu

TOKENS = 70
OTHERS = [(LONGEST - TOKENS) // 6] * 6
"""Beside a prompt: together they are the longest step that was rehearsed."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_bits_of_a_position_on_a_gpu_do_not_depend_on_its_step(case: str, dtype: Dtype, goldens: Path) -> None:
    """Hidden states, logits and KV, as equality; and the KV that decode graphs write, of one sequence and of eight."""
    slots = slots_for(goldens / case)
    if slots is None or (dtype == "float32" and open_model(goldens / case).spec.expert_format.name):
        pytest.skip("no experts, or quantised ones, which a GPU computes in bfloat16")
    with device_model(str(goldens / case), dtype, slots, graphs=True, deterministic=True) as device:
        sequences = Sequences(device.runner, case, TOKENS, OTHERS)
        every_way(sequences)
        by_graph(sequences)
        assert device.graphs is not None and device.graphs.sizes == [1, TOGETHER]


def by_graph(sequences: Sequences) -> None:
    """KV of the first sequence's last positions, each decoded alone and then again beside the others: from the second
    time on by graph. Against those of its prefill, or where that has another state, of the two against each other."""
    whole = sequences.in_chunks([sequences.tokens])[2:]
    start = sequences.tokens - DECODED
    for number in range(TOGETHER):
        sequences.run("demand", sequences.part(number, 0, start - number))
    state = sequences.runner._states
    for position in range(start, sequences.tokens):
        parts = [sequences.part(n, position - n, position - n + 1) for n in range(TOGETHER)]
        before = state._slots.clone() if state else None
        written: list[list[torch.Tensor]] = []
        for chosen in (parts[:1], [*parts[4:], *parts[:4]]):
            if state and before is not None:
                state._slots.copy_(before)
            tokens = sequences.runner.run(RunStep("decode", list(chosen))).tokens
            assert min(tokens) >= 0
            written.append([part[position : position + 1].clone() for part in sequences.kv(0)])
        assert_same_bits(written[1], written[0])
        if not sequences.recurrent:
            assert_same_bits(written[0], [part[position : position + 1] for part in whole])
