"""A script: the Triton kernels of grouped_gemm in the interpreter, in float32, against float64 and as equality of bits.

The interpreter is wrong for bfloat16 arithmetic: float32 records, and quantised records under a float32 x.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.formats import ExpertFormat
from kernels.grouped_gemm import ref, tri, tri_inputs
from kernels.grouped_gemm.cost import Tile
from kernels.quant import quantised_inputs
from tests.kernels.expert_records import Experts
from tests.kernels.interpreted_rows import FEW, TILE, run


def check(
    experts: Experts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, tile: Tile, tolerance: float
) -> torch.Tensor:
    """Against float64, and with the experts in other slots and in two spans; the rows."""
    count = experts.count
    moved = run(experts, x, weights, chosen, [2 * (count - e) for e in range(count)], [0, 1, count], tile)
    expected = experts.float64(x, weights, chosen)
    error = (moved.double() - expected).norm() / expected.norm()
    assert error < tolerance, (experts.layout.format, tile, float(error))
    plain = run(experts, x, weights, chosen, list(range(count)), [0, count], tile)
    assert torch.equal(moved, plain)
    return plain


def check_absent(
    experts: Experts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, tile: Tile, plain: torch.Tensor
) -> None:
    """Rows of experts outside the span, and of those without a slot, are left alone."""
    count = experts.count
    first = run(experts, x, weights, chosen, list(range(count)), [0, 1], tile)
    assert torch.equal(first.isnan().all(1), chosen.flatten() != 0)
    without = run(experts, x, weights, chosen, [e if e != 1 else -1 for e in range(count)], [0, count], tile)
    absent = chosen.flatten() == 1
    assert without[absent].isnan().all() and torch.equal(without[~absent], plain[~absent])


GPT_OSS = ExpertFormat("float32", bias=True, swiglu_limit=0.9)
BLOCKS_OF_32 = ExpertFormat("fp8_block", block=(16, 32), bias=True)  # whole steps under one scale
for kind, hidden, intermediate, count, tokens in (
    ("float32", 40, 24, 3, 5),
    ("nvfp4", 96, 48, 3, 5),
    ("nvfp4", 64, 64, 2, 20),  # more rows than one tile has
    (GPT_OSS, 33, 24, 2, 1),
    ("gpt-oss", 96, 32, 2, 1),
    ("fp8_tensor", 40, 23, 2, 1),
    ("fp8_block", 42, 31, 2, 1),
    (BLOCKS_OF_32, 42, 31, 2, 1),
    ("w4a4", 64, 32, 2, 1),
):
    generator = torch.Generator().manual_seed(hidden)
    experts = Experts(kind, hidden, intermediate, count, generator)
    x = torch.randn(tokens, hidden, generator=generator)
    weights = torch.rand(tokens, 2, generator=generator)
    chosen = torch.rand(tokens, count, generator=generator).argsort(1)[:, :2].to(torch.int32)
    for tile in (TILE, FEW)[: 1 if tokens == 20 else 2]:
        plain = check(experts, x, weights, chosen, tile, 1e-5)
        if tokens == 5:
            check_absent(experts, x, weights, chosen, tile, plain)
    if kind in ("nvfp4", "gpt-oss") and tokens < 20:  # x is taken apart by its bits; bfloat16 is kept of the rows
        check(experts, x.to(torch.bfloat16), weights, chosen, FEW, 2e-2)

for dtype in (torch.float32, torch.bfloat16):
    inputs = (torch.randn(3, 1056, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    inputs[0, :16], inputs[1, 5], inputs[2, 7] = 0, 1e6, float("nan")
    for input_scale in (0.0123, 2.0**-9):
        expected = quantised_inputs(inputs, input_scale)
        actual = tri_inputs.quantised(inputs, input_scale)
        assert torch.equal(actual[:2], expected[:2]) and torch.equal(actual[2, 16:], expected[2, 16:])
        assert actual[2, 7].isnan()

rows = torch.randn(6, 1030, generator=torch.Generator().manual_seed(1))
assert torch.equal(tri.combine(rows, 2), ref.combine(rows, 2))
print("ok")
