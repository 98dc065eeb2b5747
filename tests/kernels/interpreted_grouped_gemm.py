"""A script: the Triton kernels of grouped_gemm in the interpreter, in float32, against float64 and as equality of bits.

The interpreter is wrong for bfloat16 arithmetic: float32 records, and NVFP4 records under a float32 x.
"""

import itertools
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.grouped_gemm import ref, tri
from kernels.grouped_gemm.cost import Tile
from kernels.moe_align import blocks, max_blocks, moe_align
from tests.kernels.expert_records import Experts

TILE = Tile(block_m=16, block_n=32, block_k=32, stages=1, warps=4)


def run(
    experts: Experts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, order: list[int], cuts: list[int]
) -> torch.Tensor:
    """Rows with expert e in slot order[e], in none if that is negative, and a launch for each span between `cuts`."""
    pool = experts.pool(max(order) + 2, {expert: slot for expert, slot in enumerate(order) if slot >= 0})
    table = blocks(moe_align(chosen, experts.count), TILE.block_m)
    slot_of = torch.tensor(order, dtype=torch.int32)
    rows = torch.full((chosen.numel(), experts.layout.hidden), float("nan"))
    mid = torch.full((chosen.numel(), experts.layout.intermediate), float("nan"))
    k = chosen.shape[1]
    nvfp4 = experts.layout.format == "nvfp4"
    left = tri.even_first(x) if nvfp4 else x
    for begin, end in itertools.pairwise(cuts):
        span = torch.tensor([begin, end], dtype=torch.int32)
        common = (pool, slot_of, span, table.routes, table.starts, table.expert, table.first, table.rows)
        bound = max_blocks(chosen.numel(), end - begin, TILE.block_m)
        arguments = tri.gate_up_arguments(experts.layout, k, TILE, decode_by_bits=False)
        columns = -(-experts.layout.intermediate // TILE.block_n)
        tri._gate_up[(bound * columns,)](left, mid, *common, **arguments)
        arguments = tri.down_arguments(experts.layout, TILE, decode_by_bits=False)
        columns = -(-experts.layout.hidden // TILE.block_n)
        tri._down[(bound * columns,)](mid, rows, weights, *common, **arguments)
    return rows


for format_name, hidden, intermediate, count, tokens in (
    ("float32", 40, 24, 3, 5),
    ("nvfp4", 96, 48, 3, 5),
    ("nvfp4", 64, 64, 2, 20),
):
    generator = torch.Generator().manual_seed(hidden)
    experts = Experts(format_name, hidden, intermediate, count, generator)
    x = torch.randn(tokens, hidden, generator=generator)
    weights = torch.rand(tokens, 2, generator=generator)
    chosen = torch.rand(tokens, count, generator=generator).argsort(1)[:, :2].to(torch.int32)
    plain = run(experts, x, weights, chosen, list(range(count)), [0, count])
    expected = experts.float64(x, weights, chosen)
    error = (plain.double() - expected).norm() / expected.norm()
    assert error < 1e-5, (format_name, float(error))
    moved = run(experts, x, weights, chosen, [2 * (count - e) for e in range(count)], [0, 1, count])
    assert torch.equal(moved, plain)
    first = run(experts, x, weights, chosen, list(range(count)), [0, 1])
    assert torch.equal(first.isnan().all(1), chosen.flatten() != 0)  # the others' rows are left alone
    without = run(experts, x, weights, chosen, [e if e != 1 else -1 for e in range(count)], [0, count])
    absent = chosen.flatten() == 1
    assert without[absent].isnan().all() and torch.equal(without[~absent], plain[~absent])

rows = torch.randn(6, 1030, generator=torch.Generator().manual_seed(1))
assert torch.equal(tri.combine(rows, 2), ref.combine(rows, 2))
print("ok")
