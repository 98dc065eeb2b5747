"""Tensors in memory that the device shares with the host: against torch's own, and a model over them against one over
memory of its own. On a GPU: tests/worker/test_device_model.py."""

from pathlib import Path

import pytest
import torch

from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.random_model import Sizes, write_random_model
from worker.dense_steps import DenseSteps
from worker.dummy import dummy_dense
from worker.host_backend import HostBackend
from worker.host_memory import HostMemory, copy_in, zeros_in
from worker.kv import KvCache
from worker.model import build_model
from worker.protocol import RunStep, Sampling, SequenceStep
from worker.step import FullResult, StepRunner
from worker.weights import load_dense

CPU = torch.device("cpu")
ALLOCATE = HostBackend().allocate_host


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 5), (2, 16, 2, 8)])
def test_what_lies_there_is_what_was_put_there(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    zeros = zeros_in(ALLOCATE)(shape, dtype)
    assert torch.equal(zeros, torch.zeros(shape, dtype=dtype)) and zeros.is_contiguous()
    source = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(copy_in(ALLOCATE, source), source)
    assert torch.equal(copy_in(ALLOCATE, source.transpose(0, -1)), source.transpose(0, -1))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_answers_the_same_over_such_memory(tmp_path: Path, load_format: str) -> None:
    """Hidden states, logits and tokens, bit for bit; and all of what was asked for lies there."""
    write_random_model(tmp_path, Sizes(layers=2, experts=0, hidden=32, intermediate=16, vocab_size=64))
    checkpoint = open_model(tmp_path)
    taken: list[int] = []

    def allocate(nbytes: int) -> HostMemory:
        taken.append(nbytes)
        return ALLOCATE(nbytes)

    def answers(host: bool) -> list[FullResult]:
        there = allocate if host else None
        if load_format == "dummy":
            weights = dummy_dense(checkpoint.spec, "float32", CPU, lambda _: None, there)
        else:
            weights = load_dense(checkpoint, "float32", CPU, lambda _: None, there)
        zeros = zeros_in(allocate) if host else None
        kv = KvCache(checkpoint.spec, 4, 4, torch.float32, CPU, zeros)
        if host:
            assert sorted(taken) == sorted([64 * 32 * 4, *[kv.nbytes // 4] * 4])
        runner = StepRunner(checkpoint.spec, build_model(checkpoint.spec, weights, kv, None), kv, DenseSteps())
        steps = [RunStep("streamed", [SequenceStep(0, [5, 9, 3, 7, 1], 0, [2, 0], Sampling())])]
        steps.append(RunStep("decode", [SequenceStep(0, [8], 5, [2, 0], Sampling())]))
        return [runner.run_full(step) for step in steps]

    for ours, theirs in zip(answers(True), answers(False), strict=True):
        assert torch.equal(ours.hidden, theirs.hidden) and torch.equal(ours.logits, theirs.logits)
        assert ours.result.tokens == theirs.result.tokens
