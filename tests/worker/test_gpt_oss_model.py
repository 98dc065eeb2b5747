"""gpt-oss from the hub's spelling, with the real slot pool and copier over shared memory, S a little above E."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from copyengine.checkpoint.model import open_model
from copyengine.records import record_layout
from tests.worker.resident_experts import CPU, read_banks
from tests.worker.test_host_slots import Rig
from worker.geometry import SlotGeometry
from worker.host_experts import HostExperts
from worker.kv import KvCache
from worker.model import build_model
from worker.protocol import Mode, RunStep, Sampling, SequenceStep
from worker.step import FullResult, StepRunner
from worker.weights import load_dense

PAGE_TOKENS = 4
MODES: tuple[Mode, ...] = ("demand", "streamed")


@pytest.fixture
def runner(goldens: Path) -> Iterator[StepRunner]:
    model = open_model(goldens / "gpt_oss_mxfp4")
    record, moe = record_layout(model.spec, "float32"), model.spec.moe
    assert record is not None and moe is not None
    rig = Rig(SlotGeometry(len(model.spec.moe_layers), moe.experts, record.record_nbytes, moe.experts + 1, max_query=3))
    try:
        rig.banks = [bank.reshape(-1) for bank in read_banks(model, record)]
        rig.slots.pool_bytes[:] = 0xFF
        rig.attach()
        kv = KvCache(model.spec, 40, PAGE_TOKENS, torch.float32, CPU)
        experts = HostExperts(rig.slots, torch.from_numpy(rig.slots.pool_bytes), record, moe.experts)
        decoder = build_model(model.spec, load_dense(model, "float32", CPU, lambda _: None), kv, experts)
        yield StepRunner(model.spec, decoder, kv, rig.slots)
    finally:
        rig.close()


def run(runner: StepRunner, mode: Mode, tokens: list[int], start: int, pages: list[int]) -> FullResult:
    used = pages[: -(-(start + len(tokens)) // PAGE_TOKENS)]
    return runner.run_full(RunStep(mode, [SequenceStep(0, tokens, start, used, Sampling())]))


def test_demand_and_streamed_chunks_have_the_same_bits(runner: StepRunner, goldens: Path) -> None:
    """As equality, and against transformers' logits."""
    golden = np.load(goldens / "gpt_oss_mxfp4.npz")
    ids = golden["ids"].tolist()
    demand, streamed = (run(runner, mode, ids, 0, list(range(20))) for mode in MODES)
    assert torch.equal(demand.hidden, streamed.hidden) and torch.equal(demand.logits, streamed.logits)
    np.testing.assert_allclose(demand.logits.numpy(), golden["logits"], atol=1e-4 * np.abs(golden["logits"]).max())


def test_a_prefix_in_the_pages_of_another_sequence_is_its_own(runner: StepRunner, goldens: Path) -> None:
    """Against the whole computed anew: the rest of the prompt, longer than the window, over pages that are shared."""
    ids = np.load(goldens / "gpt_oss_mxfp4.npz")["ids"].tolist()
    other = ids[:24] + list(reversed(ids[24:]))
    run(runner, "demand", ids, 0, list(range(20)))
    shared = run(runner, "demand", other[24:], 24, [*range(6), *range(20, 30)])
    anew = run(runner, "demand", other, 0, list(range(20, 40)))
    torch.testing.assert_close(shared.logits, anew.logits[24:], atol=1e-4, rtol=1e-4)
