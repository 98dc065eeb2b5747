"""A script: the checks of bad_neighbours.py on the Triton kernels in the interpreter."""

import os
import warnings

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.causal_conv import tri as conv
from kernels.gated_delta import tri, tri_step
from kernels.grouped_gemm.cost import Tile
from tests.kernels.bad_neighbours import Run, check_experts, check_state_steps, check_states
from tests.kernels.expert_records import Experts
from tests.kernels.interpreted_rows import FEW, TILE, run

warnings.simplefilter("ignore")  # numpy's, of NaN
NAN = float("nan")

check_states(tri.gated_delta, conv.causal_conv, NAN)
check_state_steps(tri_step.gated_delta_step, conv.causal_conv_step, NAN)


def rows_by(tile: Tile) -> Run:
    def rows(experts: Experts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = [2 * (experts.count - e) for e in range(experts.count)]
        return run(experts, x, weights, chosen, order, [0, 1, experts.count], tile)

    return rows


for tile in (TILE, FEW):
    check_experts(rows_by(tile), NAN, tokens=13)
print("ok")
