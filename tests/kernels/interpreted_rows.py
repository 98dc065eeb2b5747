"""Rows of experts by the Triton kernels, in the interpreter. Imported by scripts that have set TRITON_INTERPRET."""

import itertools

import torch

from kernels.grouped_gemm import ref, tri, tri_few, tri_inputs
from kernels.grouped_gemm.cost import Tile, Tiles
from kernels.moe_align import blocks, max_blocks, moe_align
from tests.kernels.expert_records import Experts

TILE = Tile(block_m=16, block_n=32, block_k=32, stages=1, warps=4)
FEW = Tile(block_m=1, block_n=32, block_k=32, stages=1, warps=4)


def run(
    experts: Experts,
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    order: list[int],
    cuts: list[int],
    tile: Tile = TILE,
) -> torch.Tensor:
    """Rows with expert e in slot order[e], in none if that is negative, and a launch for each span between `cuts`."""
    pool = experts.pool(max(order) + 2, {expert: slot for expert, slot in enumerate(order) if slot >= 0})
    table = blocks(moe_align(chosen, experts.count), tile.block_m)
    slot_of = torch.tensor(order, dtype=torch.int32)
    rows = torch.full((chosen.numel(), experts.layout.hidden), float("nan"), dtype=x.dtype)
    mid = torch.full((chosen.numel(), experts.layout.intermediate), float("nan"), dtype=x.dtype)
    k = chosen.shape[1]
    scales = experts.input_scales(x)
    if scales:
        x = tri_inputs.quantised(x, scales.gate_up)
    scales = scales or ref.NO_SCALES
    left = tri.even_first(x) if experts.layout.format in ("nvfp4", "mxfp4") else x
    for begin, end in itertools.pairwise(cuts):
        span = torch.tensor([begin, end], dtype=torch.int32)
        if tile.block_m == 1:
            tri_few.grouped_gemm_slots(
                x, weights, table, pool, experts.layout, slot_of, span, Tiles(tile, tile), mid, rows, scales
            )
            continue
        common = (pool, slot_of, span, table.routes, table.starts, table.expert, table.first, table.rows)
        bound = max_blocks(chosen.numel(), end - begin, TILE.block_m)
        arguments = tri.gate_up_arguments(experts.layout, k, TILE, decode_by_bits=False)
        columns = -(-experts.layout.intermediate // TILE.block_n)
        tri._gate_up[(bound * columns,)](left, mid, *common, *scales, **arguments)
        arguments = tri.down_arguments(experts.layout, TILE, decode_by_bits=False)
        columns = -(-experts.layout.hidden // TILE.block_n)
        tri._down[(bound * columns,)](mid, rows, weights, *common, scales.down, **arguments)
    return rows
