# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: E741
"""Triton: gate-up with SiLU-and-multiply, then down with the routed weight, one program per row block and tile of N.

Both kernels compute W x^T, weights on the left: a tile of 64 or more rows of W fills a warpgroup's matrix instruction
however few rows x has, and the left operand may come from registers, where NVFP4 codes are decoded.

NVFP4 and MXFP4: a byte holds an even and an odd k, so x comes with its even columns first and its odd ones behind them,
and the two nibbles' products are two dots. How codes are decoded says tri_decode.

A row's values depend on its place in its block and on the tile, never on the slot or on the launch.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.formats import RecordLayout
from kernels.grouped_gemm.cost import Tile, Tiles
from kernels.grouped_gemm.ref import NO_SCALES, InputScales
from kernels.grouped_gemm.tri_arguments import format_arguments, has_fp8_type
from kernels.grouped_gemm.tri_decode import BACK, NVFP4_GROUP, e2m1_scaled, fp8_add, fp8_end
from kernels.grouped_gemm.tri_inputs import activation, quantised_rows
from kernels.moe_align import Blocks

_COLUMNS = tl.constexpr(1024)
"""Of the sum of a token's rows, for each program."""


def grouped_gemm_slots(
    x: torch.Tensor,
    weights: torch.Tensor,
    blocks: Blocks,
    pool: torch.Tensor,
    layout: RecordLayout,
    slot_of: torch.Tensor,
    span: torch.Tensor,
    grid_blocks: int,
    tiles: Tiles,
    mid: torch.Tensor,
    out_rows: torch.Tensor,
    input_scales: InputScales = NO_SCALES,
) -> None:
    """`x` as `kernels.grouped_gemm.arrange` gives it."""
    if grid_blocks == 0:
        return
    x, weights, k = x.contiguous(), weights.contiguous(), weights.shape[1]
    gate_up(x, blocks, grid_blocks, span, slot_of, pool, layout, k, tiles.gate_up, mid, input_scales)
    down(mid, weights, blocks, grid_blocks, span, slot_of, pool, layout, tiles.down, out_rows, input_scales)


def gate_up(
    x: torch.Tensor,
    blocks: Blocks,
    grid_blocks: int,
    span: torch.Tensor,
    slot_of: torch.Tensor,
    pool: torch.Tensor,
    layout: RecordLayout,
    k: int,
    tile: Tile,
    mid: torch.Tensor,
    input_scales: InputScales = NO_SCALES,
) -> None:
    """mid[i] = act(gate, up) of sorted route i. For nvfp4 and mxfp4, x and mid have their even columns first."""
    arguments = gate_up_arguments(layout, k, tile, has_fp8_type())
    grid = (triton.cdiv(layout.intermediate, tile.block_n) * grid_blocks,)
    _gate_up[grid](
        x,
        mid,
        pool,
        slot_of,
        span,
        blocks.routes,
        blocks.starts,
        blocks.expert,
        blocks.first,
        blocks.rows,
        *input_scales,
        **arguments,
    )


def down(
    mid: torch.Tensor,
    weights: torch.Tensor,
    blocks: Blocks,
    grid_blocks: int,
    span: torch.Tensor,
    slot_of: torch.Tensor,
    pool: torch.Tensor,
    layout: RecordLayout,
    tile: Tile,
    out_rows: torch.Tensor,
    input_scales: InputScales = NO_SCALES,
) -> None:
    """out_rows[routes[i]] = weights[routes[i]] * (down of mid[i])."""
    arguments = down_arguments(layout, tile, has_fp8_type())
    grid = (triton.cdiv(layout.hidden, tile.block_n) * grid_blocks,)
    _down[grid](
        mid,
        out_rows,
        weights,
        pool,
        slot_of,
        span,
        blocks.routes,
        blocks.starts,
        blocks.expert,
        blocks.first,
        blocks.rows,
        input_scales.down,
        **arguments,
    )


def combine(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    out = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel():
        grid = (tokens, triton.cdiv(rows.shape[1], _COLUMNS.value))
        _combine[grid](rows, out, H=rows.shape[1], K=rows.shape[0] // tokens, num_warps=4)
    return out


def even_first(x: torch.Tensor) -> torch.Tensor:
    """[T, H] with the even columns first."""
    tokens, hidden = x.shape
    return x.reshape(tokens, hidden // 2, 2).transpose(1, 2).contiguous().view(tokens, hidden)


@functools.cache
def gate_up_arguments(
    layout: RecordLayout, k: int, tile: Tile, fp8_type: bool = True, decode_by_bits: bool = True
) -> dict[str, Any]:
    """Constants and options; not to be changed."""
    limit = layout.kind.swiglu_limit or 0.0
    return {"K": k, "LIMIT": limit, **_arguments(layout, "gate_up", tile, fp8_type, decode_by_bits)}


@functools.cache
def down_arguments(
    layout: RecordLayout, tile: Tile, fp8_type: bool = True, decode_by_bits: bool = True
) -> dict[str, Any]:
    """Constants and options; not to be changed."""
    return _arguments(layout, "down", tile, fp8_type, decode_by_bits)


def _arguments(layout: RecordLayout, matrix: str, tile: Tile, fp8_type: bool, decode_by_bits: bool) -> dict[str, Any]:
    return {
        **format_arguments(layout, matrix, fp8_type),
        "BITS": decode_by_bits,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


@triton.jit
def _store_split(ptr, rows, columns, values, mask, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """Into [rows, WIDTH]; with SPLIT the even columns come first."""
    if SPLIT:
        columns = columns // 2 + (columns % 2) * (WIDTH // 2)
    tl.store(ptr + rows * WIDTH + columns, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_up(
    x_ptr,  # [T, H]
    mid_ptr,  # [T * K, I]
    pool_ptr,
    slot_of_ptr,  # [E] int32
    span_ptr,  # [2] int32
    routes_ptr,
    starts_ptr,
    expert_ptr,
    first_ptr,
    rows_ptr,
    in_scale,  # of quantised inputs, as down_scale
    down_scale,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    RECORD: tl.constexpr,
    FIELD: tl.constexpr,
    SCALES: tl.constexpr,
    GLOBALS: tl.constexpr,
    BIASES: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    QUANTISED: tl.constexpr,
    FP8_TYPE: tl.constexpr,
    LIMIT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    block = tl.load(starts_ptr + tl.load(span_ptr)) + pid // tiles
    if block >= tl.load(starts_ptr + tl.load(span_ptr + 1)):
        return
    slot = tl.load(slot_of_ptr + tl.load(expert_ptr + block))
    if slot < 0:
        return
    record = pool_ptr + slot.to(tl.int64) * RECORD
    first = tl.load(first_ptr + block)
    m = tl.arange(0, BLOCK_M)
    live = m < tl.load(rows_ptr + block)
    token = (tl.load(routes_ptr + first + m, mask=live, other=0) // K).to(tl.int64)
    n = (pid % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, I - 1)  # rows past the end are computed and not stored
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    x_rows = x_ptr + token[None, :] * H
    if GROUP:
        kk = tl.arange(0, BLOCK_K)
        g = tl.arange(0, BLOCK_K // GROUP)
        codes_ptr = record + FIELD + row[:, None] * (H // 2)
        scales_ptr = record + SCALES + row[:, None] * (H // (2 * GROUP))
        for start in tl.range(0, H // 2, BLOCK_K, num_stages=STAGES):
            if (H // 2) % BLOCK_K == 0:
                gate_codes = tl.load(codes_ptr + start + kk[None, :])
                up_codes = tl.load(codes_ptr + I * (H // 2) + start + kk[None, :])
                gate_scales = tl.load(scales_ptr + start // GROUP + g[None, :])
                up_scales = tl.load(scales_ptr + I * (H // (2 * GROUP)) + start // GROUP + g[None, :])
                x_even = tl.load(x_rows + start + kk[:, None])
                x_odd = tl.load(x_rows + H // 2 + start + kk[:, None])
            else:
                inside = kk < H // 2 - start
                inside_g = g < H // (2 * GROUP) - start // GROUP
                gate_codes = tl.load(codes_ptr + start + kk[None, :], mask=inside[None, :], other=0)
                up_codes = tl.load(codes_ptr + I * (H // 2) + start + kk[None, :], mask=inside[None, :], other=0)
                gate_scales = tl.load(scales_ptr + start // GROUP + g[None, :], mask=inside_g[None, :], other=0)
                up_scales = tl.load(
                    scales_ptr + I * (H // (2 * GROUP)) + start // GROUP + g[None, :], mask=inside_g[None, :], other=0
                )
                x_even = tl.load(x_rows + start + kk[:, None], mask=inside[:, None], other=0)
                x_odd = tl.load(x_rows + H // 2 + start + kk[:, None], mask=inside[:, None], other=0)
            even, odd = e2m1_scaled(gate_codes, gate_scales, GROUP, FP8_TYPE, BITS)
            gate = tl.dot(even, x_even, gate, input_precision="ieee")
            gate = tl.dot(odd, x_odd, gate, input_precision="ieee")
            even, odd = e2m1_scaled(up_codes, up_scales, GROUP, FP8_TYPE, BITS)
            up = tl.dot(even, x_even, up, input_precision="ieee")
            up = tl.dot(odd, x_odd, up, input_precision="ieee")
        if GROUP == NVFP4_GROUP:
            globals_ptr = (record + GLOBALS).to(tl.pointer_type(tl.float32))
            back: tl.constexpr = BACK if BITS else 1.0
            gate *= tl.load(globals_ptr) * back
            up *= tl.load(globals_ptr + 1) * back
        if QUANTISED:
            gate *= in_scale
            up *= in_scale
    elif FP8:
        kk = tl.arange(0, BLOCK_K)
        columns: tl.constexpr = (H + SCALE_K - 1) // SCALE_K
        codes_ptr = record + FIELD + row[:, None] * H
        gate_scales_ptr = (record + SCALES).to(tl.pointer_type(tl.float32)) + (row // SCALE_N) * columns
        up_scales_ptr = gate_scales_ptr + (I + SCALE_N - 1) // SCALE_N * columns
        for start in tl.range(0, H, BLOCK_K, num_stages=STAGES):
            x = tl.load(x_rows + start + kk[:, None], mask=(kk < H - start)[:, None], other=0)
            gate = fp8_add(gate, codes_ptr, gate_scales_ptr, x, start, H, SCALE_K, BLOCK_K, BITS)
            up = fp8_add(up, codes_ptr + I * H, up_scales_ptr, x, start, H, SCALE_K, BLOCK_K, BITS)
        gate = fp8_end(gate, gate_scales_ptr, H, SCALE_K)
        up = fp8_end(up, up_scales_ptr, H, SCALE_K)
    else:
        kk = tl.arange(0, BLOCK_K)
        w_ptr = (record + FIELD).to(tl.pointer_type(x_ptr.dtype.element_ty)) + row[:, None] * H
        for start in tl.range(0, H, BLOCK_K, num_stages=STAGES):
            inside = kk < H - start
            gate_w = tl.load(w_ptr + start + kk[None, :], mask=inside[None, :], other=0)
            up_w = tl.load(w_ptr + I * H + start + kk[None, :], mask=inside[None, :], other=0)
            x = tl.load(x_rows + start + kk[:, None], mask=inside[:, None], other=0)
            gate = tl.dot(gate_w, x, gate, input_precision="ieee")
            up = tl.dot(up_w, x, up, input_precision="ieee")
    if BIASES:
        biases_ptr = (record + BIASES).to(tl.pointer_type(tl.float32)) + row
        gate += tl.load(biases_ptr)[:, None]
        up += tl.load(biases_ptr + I)[:, None]
    hidden = activation(gate, up, LIMIT)
    if QUANTISED:
        hidden = quantised_rows(hidden.to(mid_ptr.dtype.element_ty).to(tl.float32), down_scale)
    rows = (first + m).to(tl.int64)
    _store_split(mid_ptr, rows[None, :], n[:, None], hidden, live[None, :] & (n < I)[:, None], I, GROUP)


@triton.jit
def _down(
    mid_ptr,  # [T * K, I]
    out_ptr,  # [T * K, H]
    weights_ptr,  # [T * K] float32
    pool_ptr,
    slot_of_ptr,  # [E] int32
    span_ptr,  # [2] int32
    routes_ptr,
    starts_ptr,
    expert_ptr,
    first_ptr,
    rows_ptr,
    in_scale,  # of quantised inputs
    H: tl.constexpr,
    I: tl.constexpr,
    RECORD: tl.constexpr,
    FIELD: tl.constexpr,
    SCALES: tl.constexpr,
    GLOBALS: tl.constexpr,
    BIASES: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    QUANTISED: tl.constexpr,
    FP8_TYPE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    block = tl.load(starts_ptr + tl.load(span_ptr)) + pid // tiles
    if block >= tl.load(starts_ptr + tl.load(span_ptr + 1)):
        return
    slot = tl.load(slot_of_ptr + tl.load(expert_ptr + block))
    if slot < 0:
        return
    record = pool_ptr + slot.to(tl.int64) * RECORD
    first = tl.load(first_ptr + block)
    m = tl.arange(0, BLOCK_M)
    live = m < tl.load(rows_ptr + block)
    rows = tl.where(live, first + m, first).to(tl.int64)
    route = tl.load(routes_ptr + rows).to(tl.int64)
    n = (pid % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, H - 1)  # rows past the end are computed and not stored
    out = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    x_rows = mid_ptr + rows[None, :] * I
    if GROUP:
        kk = tl.arange(0, BLOCK_K)
        g = tl.arange(0, BLOCK_K // GROUP)
        codes_ptr = record + FIELD + row[:, None] * (I // 2)
        scales_ptr = record + SCALES + row[:, None] * (I // (2 * GROUP))
        for start in tl.range(0, I // 2, BLOCK_K, num_stages=STAGES):
            if (I // 2) % BLOCK_K == 0:
                codes = tl.load(codes_ptr + start + kk[None, :])
                scales = tl.load(scales_ptr + start // GROUP + g[None, :])
                x_even = tl.load(x_rows + start + kk[:, None])
                x_odd = tl.load(x_rows + I // 2 + start + kk[:, None])
            else:
                inside = kk < I // 2 - start
                inside_g = g < I // (2 * GROUP) - start // GROUP
                codes = tl.load(codes_ptr + start + kk[None, :], mask=inside[None, :], other=0)
                scales = tl.load(scales_ptr + start // GROUP + g[None, :], mask=inside_g[None, :], other=0)
                x_even = tl.load(x_rows + start + kk[:, None], mask=inside[:, None], other=0)
                x_odd = tl.load(x_rows + I // 2 + start + kk[:, None], mask=inside[:, None], other=0)
            even, odd = e2m1_scaled(codes, scales, GROUP, FP8_TYPE, BITS)
            out = tl.dot(even, x_even, out, input_precision="ieee")
            out = tl.dot(odd, x_odd, out, input_precision="ieee")
        if GROUP == NVFP4_GROUP:
            back: tl.constexpr = BACK if BITS else 1.0
            out *= tl.load((record + GLOBALS).to(tl.pointer_type(tl.float32))) * back
        if QUANTISED:
            out *= in_scale
    elif FP8:
        kk = tl.arange(0, BLOCK_K)
        columns: tl.constexpr = (I + SCALE_K - 1) // SCALE_K
        codes_ptr = record + FIELD + row[:, None] * I
        scales_ptr = (record + SCALES).to(tl.pointer_type(tl.float32)) + (row // SCALE_N) * columns
        for start in tl.range(0, I, BLOCK_K, num_stages=STAGES):
            x = tl.load(x_rows + start + kk[:, None], mask=(kk < I - start)[:, None], other=0)
            out = fp8_add(out, codes_ptr, scales_ptr, x, start, I, SCALE_K, BLOCK_K, BITS)
        out = fp8_end(out, scales_ptr, I, SCALE_K)
    else:
        kk = tl.arange(0, BLOCK_K)
        w_ptr = (record + FIELD).to(tl.pointer_type(mid_ptr.dtype.element_ty)) + row[:, None] * I
        for start in tl.range(0, I, BLOCK_K, num_stages=STAGES):
            inside = kk < I - start
            w = tl.load(w_ptr + start + kk[None, :], mask=inside[None, :], other=0)
            x = tl.load(x_rows + start + kk[:, None], mask=inside[:, None], other=0)
            out = tl.dot(w, x, out, input_precision="ieee")
    if BIASES:
        out += tl.load((record + BIASES).to(tl.pointer_type(tl.float32)) + row)[:, None]
    out *= tl.load(weights_ptr + route)[None, :]
    where = out_ptr + route[None, :] * H + n[:, None]
    tl.store(where, out.to(out_ptr.dtype.element_ty), mask=live[None, :] & (n < H)[:, None])


@triton.jit
def _combine(rows_ptr, out_ptr, H: tl.constexpr, K: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    total = tl.zeros((_COLUMNS,), tl.float32)
    for k in tl.static_range(K):
        total += tl.load(rows_ptr + (token * K + k) * H + column, mask=column < H, other=0).to(tl.float32)
    tl.store(out_ptr + token * H + column, total.to(out_ptr.dtype.element_ty), mask=column < H)
