"""What is not a number stays where it is: each kernel against itself with sound neighbours. Attention, whose pages hold
what is not a number wherever nobody may read, is in its own tests."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.causal_conv import causal_conv, causal_conv_step
from kernels.gated_delta import gated_delta, gated_delta_step
from kernels.grouped_gemm import grouped_gemm
from kernels.moe_align import moe_align
from tests.kernels.bad_neighbours import BAD, check_experts, check_state_steps, check_states
from tests.kernels.expert_records import Experts

ROOT = Path(__file__).parents[2]


def on_the_host(experts: Experts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    rows = torch.full((chosen.numel(), x.shape[1]), float("nan"))
    everyone = list(range(experts.count))
    pool = experts.pool(experts.count, {expert: expert for expert in everyone})
    grouped_gemm(x, weights, moe_align(chosen, experts.count), pool, experts.layout, everyone, everyone, rows)
    return rows


@pytest.mark.parametrize("bad", BAD)
def test_the_references_keep_what_is_bad_apart(bad: float) -> None:
    check_states(gated_delta, causal_conv, bad)
    check_state_steps(gated_delta_step, causal_conv_step, bad)
    check_experts(on_the_host, bad)


def test_the_device_kernels_keep_what_is_bad_apart() -> None:
    """In Triton's interpreter."""
    script = Path(__file__).with_name("interpreted_bad_neighbours.py")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{script.stem}"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr[-3000:]
