# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: E741
"""Triton: gate-up with SiLU-and-multiply, then down with the routed weight, one program per row block and tile of N.

Both kernels compute W x^T, weights on the left: a tile of 64 or more rows of W fills a warpgroup's matrix instruction
however few rows x has, and the left operand may come from registers, where NVFP4 codes are decoded.

NVFP4: a byte holds an even and an odd k, so x comes with its even columns first and its odd ones behind them, and the
two nibbles' products are two dots. A nibble's bits put into the lowest exponent bits of a bfloat16 are its value
times 2^-126 (subnormal for 0.5); scale * 2^118 brings it back up to 2^-8, exactly: code * scale has 6 significant
bits. What is left, global * 2^8, multiplies the float32 sum.

A row's values depend on its place in its block and on the tile, never on the slot or on the launch.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.formats import RecordLayout
from kernels.grouped_gemm.cost import Tile, Tiles
from kernels.moe_align import Blocks

_DECODE = tl.constexpr("""
{
.reg .b32 t, s, g;
prmt.b32 t, $4, 0, 0x4140;
shl.b32 s, t, 6;   and.b32 s, s, 0x01C001C0;
shl.b32 g, t, 12;  and.b32 g, g, 0x80008000;
or.b32 $0, s, g;
shl.b32 s, t, 2;   and.b32 s, s, 0x01C001C0;
shl.b32 g, t, 8;   and.b32 g, g, 0x80008000;
or.b32 $2, s, g;
prmt.b32 t, $4, 0, 0x4342;
shl.b32 s, t, 6;   and.b32 s, s, 0x01C001C0;
shl.b32 g, t, 12;  and.b32 g, g, 0x80008000;
or.b32 $1, s, g;
shl.b32 s, t, 2;   and.b32 s, s, 0x01C001C0;
shl.b32 g, t, 8;   and.b32 g, g, 0x80008000;
or.b32 $3, s, g;
}
""")
"""Four bytes to their low nibbles ($0, $1) and high nibbles ($2, $3), pairs of bfloat16: value * 2^-126."""

_UP = tl.constexpr(2.0**118)
_BACK = tl.constexpr(2.0**8)

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
) -> None:
    """`x` as `kernels.grouped_gemm.arrange` gives it."""
    if grid_blocks == 0:
        return
    x, weights, k = x.contiguous(), weights.contiguous(), weights.shape[1]
    gate_up(x, blocks, grid_blocks, span, slot_of, pool, layout, k, tiles.gate_up, mid)
    down(mid, weights, blocks, grid_blocks, span, slot_of, pool, layout, tiles.down, out_rows)


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
) -> None:
    """mid[i] = silu(gate) * up of sorted route i. For nvfp4, x and mid have their even columns first."""
    arguments = gate_up_arguments(layout, k, tile)
    grid = (triton.cdiv(layout.intermediate, tile.block_n) * grid_blocks,)
    _gate_up[grid](
        x, mid, pool, slot_of, span, blocks.routes, blocks.starts, blocks.expert, blocks.first, blocks.rows, **arguments
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
) -> None:
    """out_rows[routes[i]] = weights[routes[i]] * (down of mid[i])."""
    arguments = down_arguments(layout, tile)
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
def gate_up_arguments(layout: RecordLayout, k: int, tile: Tile, decode_by_bits: bool = True) -> dict[str, Any]:
    """Constants and options; not to be changed."""
    return {"K": k, **_arguments(layout, "gate_up", tile, decode_by_bits)}


@functools.cache
def down_arguments(layout: RecordLayout, tile: Tile, decode_by_bits: bool = True) -> dict[str, Any]:
    """Constants and options; not to be changed."""
    return _arguments(layout, "down", tile, decode_by_bits)


def _arguments(layout: RecordLayout, matrix: str, tile: Tile, decode_by_bits: bool) -> dict[str, Any]:
    nvfp4 = layout.format == "nvfp4"
    return {
        "H": layout.hidden,
        "I": layout.intermediate,
        "RECORD": layout.record_nbytes,
        "FIELD": layout.field(matrix).offset,
        "SCALES": layout.field(f"{matrix}_scale").offset if nvfp4 else 0,
        "GLOBALS": layout.field(f"{matrix}_global").offset if nvfp4 else 0,
        "NVFP4": nvfp4,
        "BITS": decode_by_bits,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


@triton.jit
def _decode(codes, BITS: tl.constexpr):
    """Low and high nibbles' values: times 2^-126 as bfloat16, or as they are in float32 (which the interpreter can)."""
    if BITS:
        return tl.inline_asm_elementwise(
            _DECODE, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return _value(codes & 0xF), _value(codes >> 4)


@triton.jit
def _value(code):
    low = (code & 1).to(tl.float32)
    exponent = (code >> 1) & 3
    magnitude = tl.where(exponent == 0, 0.5 * low, (0.5 + 0.25 * low) * (1 << exponent.to(tl.int32)).to(tl.float32))
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def _scaled(codes, scales, BITS: tl.constexpr):
    """[N, G * 8] bytes under [N, G] scales: the even and the odd k's values."""
    N: tl.constexpr = codes.shape[0]
    G: tl.constexpr = scales.shape[1]
    wide = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if BITS:
        wide = (wide * _UP).to(tl.bfloat16)
    wide = tl.reshape(tl.broadcast_to(wide[:, :, None], (N, G, 8)), (N, G * 8))
    even, odd = _decode(codes, BITS)
    return even * wide, odd * wide


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
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    RECORD: tl.constexpr,
    FIELD: tl.constexpr,
    SCALES: tl.constexpr,
    GLOBALS: tl.constexpr,
    NVFP4: tl.constexpr,
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
    if NVFP4:
        kk = tl.arange(0, BLOCK_K)
        g = tl.arange(0, BLOCK_K // 8)
        codes_ptr = record + FIELD + row[:, None] * (H // 2)
        scales_ptr = record + SCALES + row[:, None] * (H // 16)
        for start in tl.range(0, H // 2, BLOCK_K, num_stages=STAGES):
            if (H // 2) % BLOCK_K == 0:
                gate_codes = tl.load(codes_ptr + start + kk[None, :])
                up_codes = tl.load(codes_ptr + I * (H // 2) + start + kk[None, :])
                gate_scales = tl.load(scales_ptr + start // 8 + g[None, :])
                up_scales = tl.load(scales_ptr + I * (H // 16) + start // 8 + g[None, :])
                x_even = tl.load(x_rows + start + kk[:, None])
                x_odd = tl.load(x_rows + H // 2 + start + kk[:, None])
            else:
                inside = kk < H // 2 - start
                inside_g = g < H // 16 - start // 8
                gate_codes = tl.load(codes_ptr + start + kk[None, :], mask=inside[None, :], other=0)
                up_codes = tl.load(codes_ptr + I * (H // 2) + start + kk[None, :], mask=inside[None, :], other=0)
                gate_scales = tl.load(scales_ptr + start // 8 + g[None, :], mask=inside_g[None, :], other=0)
                up_scales = tl.load(
                    scales_ptr + I * (H // 16) + start // 8 + g[None, :], mask=inside_g[None, :], other=0
                )
                x_even = tl.load(x_rows + start + kk[:, None], mask=inside[:, None], other=0)
                x_odd = tl.load(x_rows + H // 2 + start + kk[:, None], mask=inside[:, None], other=0)
            even, odd = _scaled(gate_codes, gate_scales, BITS)
            gate = tl.dot(even, x_even, gate, input_precision="ieee")
            gate = tl.dot(odd, x_odd, gate, input_precision="ieee")
            even, odd = _scaled(up_codes, up_scales, BITS)
            up = tl.dot(even, x_even, up, input_precision="ieee")
            up = tl.dot(odd, x_odd, up, input_precision="ieee")
        globals_ptr = (record + GLOBALS).to(tl.pointer_type(tl.float32))
        back: tl.constexpr = _BACK if BITS else 1.0
        gate *= tl.load(globals_ptr) * back
        up *= tl.load(globals_ptr + 1) * back
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
    hidden = gate / (1 + tl.exp(-gate)) * up
    rows = (first + m).to(tl.int64)
    _store_split(mid_ptr, rows[None, :], n[:, None], hidden, live[None, :] & (n < I)[:, None], I, NVFP4)


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
    H: tl.constexpr,
    I: tl.constexpr,
    RECORD: tl.constexpr,
    FIELD: tl.constexpr,
    SCALES: tl.constexpr,
    GLOBALS: tl.constexpr,
    NVFP4: tl.constexpr,
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
    if NVFP4:
        kk = tl.arange(0, BLOCK_K)
        g = tl.arange(0, BLOCK_K // 8)
        codes_ptr = record + FIELD + row[:, None] * (I // 2)
        scales_ptr = record + SCALES + row[:, None] * (I // 16)
        for start in tl.range(0, I // 2, BLOCK_K, num_stages=STAGES):
            if (I // 2) % BLOCK_K == 0:
                codes = tl.load(codes_ptr + start + kk[None, :])
                scales = tl.load(scales_ptr + start // 8 + g[None, :])
                x_even = tl.load(x_rows + start + kk[:, None])
                x_odd = tl.load(x_rows + I // 2 + start + kk[:, None])
            else:
                inside = kk < I // 2 - start
                inside_g = g < I // 16 - start // 8
                codes = tl.load(codes_ptr + start + kk[None, :], mask=inside[None, :], other=0)
                scales = tl.load(scales_ptr + start // 8 + g[None, :], mask=inside_g[None, :], other=0)
                x_even = tl.load(x_rows + start + kk[:, None], mask=inside[:, None], other=0)
                x_odd = tl.load(x_rows + I // 2 + start + kk[:, None], mask=inside[:, None], other=0)
            even, odd = _scaled(codes, scales, BITS)
            out = tl.dot(even, x_even, out, input_precision="ieee")
            out = tl.dot(odd, x_odd, out, input_precision="ieee")
        back: tl.constexpr = _BACK if BITS else 1.0
        out *= tl.load((record + GLOBALS).to(tl.pointer_type(tl.float32))) * back
    else:
        kk = tl.arange(0, BLOCK_K)
        w_ptr = (record + FIELD).to(tl.pointer_type(mid_ptr.dtype.element_ty)) + row[:, None] * I
        for start in tl.range(0, I, BLOCK_K, num_stages=STAGES):
            inside = kk < I - start
            w = tl.load(w_ptr + start + kk[None, :], mask=inside[None, :], other=0)
            x = tl.load(x_rows + start + kk[:, None], mask=inside[:, None], other=0)
            out = tl.dot(w, x, out, input_precision="ieee")
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
