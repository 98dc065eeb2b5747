# mypy: allow-untyped-calls
"""Quantised checkpoints on a GPU: the host's logits of the same files, and the same bits on demand and streamed."""

from pathlib import Path

import numpy as np
import pytest
import torch

from copyengine.checkpoint.quantise import main as quantise
from copyengine.checkpoint.random_model import Sizes, write_random_model
from tests.worker.device_model import GREEDY, Device, device_model, prompt
from tests.worker.resident_experts import resident_runner
from worker.protocol import Mode, RunStep, SequenceStep
from worker.step import FullResult

pytestmark = pytest.mark.gpu

SIZES = Sizes(
    layers=3, hidden=96, intermediate=64, experts=16, experts_per_token=4, heads=4, kv_heads=2, vocab_size=512
)
PROMPT, DECODED = 70, 6
BOUND = 0.04
"""Of the largest difference of a position's logits over its largest logit, bfloat16 against float32: rounding leaves
0.01. A position where rounding changes which experts are routed to may be further off."""
FURTHER_OFF = 0.1
"""The share of positions that may be."""


def full(device: Device, mode: Mode, tokens: list[int], start: int = 0) -> FullResult:
    pages = list(range(-(-(start + len(tokens)) // 16)))
    return device.runner.run_full(RunStep(mode, [SequenceStep(0, tokens, start, pages, GREEDY)]))


@pytest.mark.parametrize("flags", ["nvfp4", "fp8_block", "fp8_block --block 48,32", "mxfp4"])
def test_a_quantised_checkpoint_on_a_gpu(flags: str, tmp_path: Path) -> None:
    """With a pool that a layer's experts do not fit into and one that holds all; rows of a prompt and of decode."""
    source, target = tmp_path / "source", tmp_path / "quantised"
    source.mkdir()
    write_random_model(source, SIZES)
    assert quantise([str(source), str(target), "--format", *flags.split()]) == 0
    tokens = prompt(PROMPT + DECODED, 5)
    pages = list(range(-(-len(tokens) // 16)))
    host = resident_runner(str(target), "float32", 64, 16)
    expected = host.run_full(RunStep("demand", [SequenceStep(0, tokens, 0, pages, GREEDY)])).logits.numpy()
    seen = []
    for slots in (8, 48):
        with device_model(str(target), "bfloat16", slots) as device:
            for mode in ("streamed", "demand"):
                prefill = full(device, mode, tokens[:PROMPT])
                decode = [full(device, "decode", tokens[i : i + 1], i).logits for i in range(PROMPT, len(tokens))]
                seen.append(torch.cat([prefill.logits, *decode]))
    assert all(torch.equal(seen[0], other) for other in seen[1:])
    off = np.abs(seen[0].cpu().numpy() - expected).max(axis=-1) / np.abs(expected).max(axis=-1)
    assert (off > BOUND).mean() <= FURTHER_OFF, np.sort(off)
