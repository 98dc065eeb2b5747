# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: E741
"""Triton for few tokens: a program has one route and block_n rows of W, and sums products without matrix instructions.

With about one row for each expert a matrix instruction would multiply by 15 rows of nothing, and what decides is how
soon and how many loads of W are under way. A thread loads 16 bytes of a row of W and the columns of x that belong to
them, without shared memory and so without a barrier in the loop; its sums meet once, at the end. An expert with several
routes is read once for each, out of the L2 but for the first time.

NVFP4 and MXFP4: a word holds eight k. Two nibbles at a time are put into the exponents of a pair of float16, which are
then their values times 2^-14, exactly; products and sums are float32, and a block's scale multiplies the sum of its
words.

A row's values depend on x, its expert and the tile, on nothing else.
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
from kernels.grouped_gemm.tri_decode import NVFP4_GROUP, e4m3, e4m3_scales, e8m0
from kernels.grouped_gemm.tri_inputs import activation, quantised_vector
from kernels.moe_align import Blocks

_DECODE = tl.constexpr("""
{
.reg .b32 s, r;
.reg .b16 low, high;
shl.b32 s, $8, 9;  and.b32 s, s, 0x0E000E00;  shl.b32 r, $8, 12;  lop3.b32 r, r, 0x80008000, s, 0xEA;
mov.b32 {low, high}, r;  cvt.f32.f16 $0, low;  cvt.f32.f16 $4, high;
shl.b32 s, $8, 5;  and.b32 s, s, 0x0E000E00;  shl.b32 r, $8, 8;  lop3.b32 r, r, 0x80008000, s, 0xEA;
mov.b32 {low, high}, r;  cvt.f32.f16 $1, low;  cvt.f32.f16 $5, high;
shl.b32 s, $8, 1;  and.b32 s, s, 0x0E000E00;  shl.b32 r, $8, 4;  lop3.b32 r, r, 0x80008000, s, 0xEA;
mov.b32 {low, high}, r;  cvt.f32.f16 $2, low;  cvt.f32.f16 $6, high;
shr.b32 s, $8, 3;  and.b32 s, s, 0x0E000E00;  lop3.b32 r, $8, 0x80008000, s, 0xEA;
mov.b32 {low, high}, r;  cvt.f32.f16 $3, low;  cvt.f32.f16 $7, high;
}
""")
"""A word's eight nibbles as float32: value * 2^-14. lop3 by 0xEA is (a & b) | c."""

_BACK = tl.constexpr(2.0**14)


def grouped_gemm_slots(
    x: torch.Tensor,
    weights: torch.Tensor,
    blocks: Blocks,
    pool: torch.Tensor,
    layout: RecordLayout,
    slot_of: torch.Tensor,
    span: torch.Tensor,
    tiles: Tiles,
    mid: torch.Tensor,
    out_rows: torch.Tensor,
    input_scales: InputScales = NO_SCALES,
) -> None:
    """Of blocks of one row; x as it is."""
    if blocks.routes.shape[0] == 0:
        return
    x, weights, k = x.contiguous(), weights.contiguous(), weights.shape[1]
    gate_up(x, blocks, span, slot_of, pool, layout, k, tiles.gate_up, mid, input_scales)
    down(mid, weights, blocks, span, slot_of, pool, layout, tiles.down, out_rows, input_scales)


def gate_up(
    x: torch.Tensor,
    blocks: Blocks,
    span: torch.Tensor,
    slot_of: torch.Tensor,
    pool: torch.Tensor,
    layout: RecordLayout,
    k: int,
    tile: Tile,
    mid: torch.Tensor,
    input_scales: InputScales = NO_SCALES,
) -> None:
    """mid[i] = act(gate, up) of sorted route i."""
    grid = (triton.cdiv(layout.intermediate, tile.block_n) * blocks.routes.shape[0],)
    options = arguments(layout, "gate_up", tile, has_fp8_type())
    tables = (pool, slot_of, span, blocks.routes, blocks.expert)
    _gate_up[grid](x, mid, *tables, *input_scales, K=k, LIMIT=layout.kind.swiglu_limit or 0.0, **options)


def down(
    mid: torch.Tensor,
    weights: torch.Tensor,
    blocks: Blocks,
    span: torch.Tensor,
    slot_of: torch.Tensor,
    pool: torch.Tensor,
    layout: RecordLayout,
    tile: Tile,
    out_rows: torch.Tensor,
    input_scales: InputScales = NO_SCALES,
) -> None:
    """out_rows[routes[i]] = weights[routes[i]] * (down of mid[i])."""
    grid = (triton.cdiv(layout.hidden, tile.block_n) * blocks.routes.shape[0],)
    options = arguments(layout, "down", tile, has_fp8_type())
    tables = (pool, slot_of, span, blocks.routes, blocks.expert)
    _down[grid](mid, out_rows, weights, *tables, input_scales.down, **options)


@functools.cache
def arguments(layout: RecordLayout, matrix: str, tile: Tile, fp8_type: bool = True) -> dict[str, Any]:
    """Constants and options of a kernel; not to be changed."""
    fp4 = layout.format in ("nvfp4", "mxfp4")
    return {
        **format_arguments(layout, matrix, fp8_type),
        "PTX": isinstance(_gate_up, triton.JITFunction),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k // 4 if fp4 else tile.block_k,
        "UNROLL": tile.stages,
        "num_warps": tile.warps,
    }


@triton.jit
def _nibbles(codes, I: tl.constexpr):
    """Nibbles I and I + 4 of each word, value * 2^-14."""
    pair = codes << (12 - 4 * I)
    pair = (pair & -0x7FFF8000) | ((pair >> 3) & 0x0E000E00)
    low = pair.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _decode(codes, PTX: tl.constexpr):
    """The eight values of each word, in the order of k."""
    if PTX:
        return tl.inline_asm_elementwise(
            _DECODE, "=f,=f,=f,=f,=f,=f,=f,=f,r", [codes], dtype=(tl.float32,) * 8, is_pure=True, pack=1
        )
    else:
        v0, v4 = _nibbles(codes, 0)
        v1, v5 = _nibbles(codes, 1)
        v2, v6 = _nibbles(codes, 2)
        v3, v7 = _nibbles(codes, 3)
        return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _four(words):
    """Four bfloat16 in each 64-bit word, as float32."""
    low = words.to(tl.int32)
    high = (words >> 32).to(tl.int32)
    return (
        (low << 16).to(tl.float32, bitcast=True),
        (low & -0x10000).to(tl.float32, bitcast=True),
        (high << 16).to(tl.float32, bitcast=True),
        (high & -0x10000).to(tl.float32, bitcast=True),
    )


@triton.jit
def _eights(x_row, start, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """x at the eight k of each of the words start .. start + BLOCK_K - 1, eight vectors; 0 past SIZE words."""
    if x_row.dtype.element_ty == tl.bfloat16:
        # As few elements as this are loaded by each thread where it needs them, not handed around (64-bit: 16 bytes a
        # word of W in one go).
        place = 2 * start + tl.arange(0, 2 * BLOCK_K)
        words = tl.load(x_row.to(tl.pointer_type(tl.int64)) + place, mask=place < 2 * SIZE, other=0)
        first, second = tl.split(tl.reshape(words, (BLOCK_K, 2)))
        x0, x1, x2, x3 = _four(first)
        x4, x5, x6, x7 = _four(second)
    else:
        word = start + tl.arange(0, BLOCK_K)
        x0 = tl.load(x_row + 8 * word, mask=word < SIZE, other=0)
        x1 = tl.load(x_row + 8 * word + 1, mask=word < SIZE, other=0)
        x2 = tl.load(x_row + 8 * word + 2, mask=word < SIZE, other=0)
        x3 = tl.load(x_row + 8 * word + 3, mask=word < SIZE, other=0)
        x4 = tl.load(x_row + 8 * word + 4, mask=word < SIZE, other=0)
        x5 = tl.load(x_row + 8 * word + 5, mask=word < SIZE, other=0)
        x6 = tl.load(x_row + 8 * word + 6, mask=word < SIZE, other=0)
        x7 = tl.load(x_row + 8 * word + 7, mask=word < SIZE, other=0)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _products(codes, x, WORDS: tl.constexpr, PTX: tl.constexpr):
    """[N, BLOCK_K // WORDS]: the sum over the k of one block's words of value * 2^-14 * x."""
    v = _decode(codes, PTX)
    total = v[0] * x[0][None, :]
    for i in tl.static_range(1, 8):
        total += v[i] * x[i][None, :]
    return tl.sum(tl.reshape(total, (codes.shape[0], codes.shape[1] // WORDS, WORDS)), 2)


@triton.jit
def _scales(address, mask, GROUP: tl.constexpr, FP8_TYPE: tl.constexpr):
    scales = tl.load(address, mask=mask, other=0)
    return e4m3_scales(scales, FP8_TYPE) if GROUP == NVFP4_GROUP else e8m0(scales)


@triton.jit
def _fp8_products(
    w_ptr,  # [N, 1]: where the rows of codes start
    scales_ptr,  # [N, 1]: where their scales start
    x,  # [1, BLOCK_K] float32
    place,  # [1, BLOCK_K] int32
    start,
    SIZE: tl.constexpr,
    SCALE_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[N, BLOCK_K]: value * x, under the scales if there are several along a row."""
    inside = place < SIZE
    products = e4m3(tl.load(w_ptr + place, mask=inside, other=0)) * x
    if SCALE_K >= SIZE:
        return products
    elif SCALE_K % BLOCK_K == 0:
        return products * tl.load(scales_ptr + start // SCALE_K)
    else:
        return products * tl.load(scales_ptr + place // SCALE_K, mask=inside, other=0)


@triton.jit
def _record(pool_ptr, slot_of_ptr, span_ptr, expert, RECORD: tl.constexpr):
    """The expert's record, and whether it is in the span and has one."""
    in_span = (expert >= tl.load(span_ptr)) & (expert < tl.load(span_ptr + 1))
    slot = tl.load(slot_of_ptr + expert)
    return pool_ptr + slot.to(tl.int64) * RECORD, in_span & (slot >= 0)


@triton.jit
def _gate_up(
    x_ptr,  # [T, H]
    mid_ptr,  # [T * K, I]
    pool_ptr,
    slot_of_ptr,  # [E] int32
    span_ptr,  # [2] int32
    routes_ptr,
    expert_ptr,
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
    PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):
    tiles: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    place = tl.program_id(0) // tiles
    route = tl.load(routes_ptr + place)
    record, mine = _record(pool_ptr, slot_of_ptr, span_ptr, tl.load(expert_ptr + place), RECORD)
    if mine == 0:
        return
    x_row = x_ptr + (route // K).to(tl.int64) * H
    n = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, I - 1)[:, None]  # rows past the end are computed and not stored
    kk = tl.arange(0, BLOCK_K)[None, :]
    if GROUP:
        words: tl.constexpr = GROUP // 4  # of codes, under one scale
        g = tl.arange(0, BLOCK_K // words)[None, :]
        gate = tl.zeros((BLOCK_N, BLOCK_K // words), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_K // words), tl.float32)
        codes_ptr = (record + FIELD).to(tl.pointer_type(tl.int32)) + row * (H // 8)
        scales_ptr = record + SCALES + row * (H // (2 * GROUP))
        for start in tl.range(0, H // 8, BLOCK_K, loop_unroll_factor=UNROLL):
            inside = start + kk < H // 8
            gate_codes = tl.load(codes_ptr + start + kk, mask=inside, other=0)
            up_codes = tl.load(codes_ptr + I * (H // 8) + start + kk, mask=inside, other=0)
            inside = start // words + g < H // (2 * GROUP)
            gate_scales = _scales(scales_ptr + start // words + g, inside, GROUP, FP8_TYPE)
            up_scales = _scales(scales_ptr + I * (H // (2 * GROUP)) + start // words + g, inside, GROUP, FP8_TYPE)
            x = _eights(x_row, start, H // 8, BLOCK_K)
            gate += _products(gate_codes, x, words, PTX) * gate_scales
            up += _products(up_codes, x, words, PTX) * up_scales
        if GROUP == NVFP4_GROUP:
            globals_ptr = (record + GLOBALS).to(tl.pointer_type(tl.float32))
            gate_sum = tl.sum(gate, 1) * (tl.load(globals_ptr) * _BACK)
            up_sum = tl.sum(up, 1) * (tl.load(globals_ptr + 1) * _BACK)
        else:
            gate_sum = tl.sum(gate, 1) * _BACK
            up_sum = tl.sum(up, 1) * _BACK
        if QUANTISED:
            gate_sum *= in_scale
            up_sum *= in_scale
    elif FP8:
        columns: tl.constexpr = (H + SCALE_K - 1) // SCALE_K
        gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        w_ptr = record + FIELD + row * H
        gate_scales_ptr = (record + SCALES).to(tl.pointer_type(tl.float32)) + (row // SCALE_N) * columns
        up_scales_ptr = gate_scales_ptr + (I + SCALE_N - 1) // SCALE_N * columns
        for start in tl.range(0, H, BLOCK_K, loop_unroll_factor=UNROLL):
            x = tl.load(x_row + start + kk, mask=start + kk < H, other=0).to(tl.float32)
            gate += _fp8_products(w_ptr, gate_scales_ptr, x, start + kk, start, H, SCALE_K, BLOCK_K)
            up += _fp8_products(w_ptr + I * H, up_scales_ptr, x, start + kk, start, H, SCALE_K, BLOCK_K)
        gate_sum = tl.sum(gate, 1)
        up_sum = tl.sum(up, 1)
        if SCALE_K >= H:
            gate_sum *= tl.load(tl.reshape(gate_scales_ptr, (BLOCK_N,)))
            up_sum *= tl.load(tl.reshape(up_scales_ptr, (BLOCK_N,)))
    else:
        gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        w_ptr = (record + FIELD).to(tl.pointer_type(x_ptr.dtype.element_ty)) + row * H
        for start in tl.range(0, H, BLOCK_K, loop_unroll_factor=UNROLL):
            inside = start + kk < H
            gate_w = tl.load(w_ptr + start + kk, mask=inside, other=0).to(tl.float32)
            up_w = tl.load(w_ptr + I * H + start + kk, mask=inside, other=0).to(tl.float32)
            x = tl.load(x_row + start + kk, mask=inside, other=0).to(tl.float32)
            gate += gate_w * x
            up += up_w * x
        gate_sum = tl.sum(gate, 1)
        up_sum = tl.sum(up, 1)
    if BIASES:
        biases_ptr = (record + BIASES).to(tl.pointer_type(tl.float32)) + tl.minimum(n, I - 1)
        gate_sum += tl.load(biases_ptr)
        up_sum += tl.load(biases_ptr + I)
    hidden = activation(gate_sum, up_sum, LIMIT)
    if QUANTISED:
        hidden = quantised_vector(hidden.to(mid_ptr.dtype.element_ty).to(tl.float32), down_scale)
    tl.store(mid_ptr + place.to(tl.int64) * I + n, hidden.to(mid_ptr.dtype.element_ty), mask=n < I)


@triton.jit
def _down(
    mid_ptr,  # [T * K, I]
    out_ptr,  # [T * K, H]
    weights_ptr,  # [T * K] float32
    pool_ptr,
    slot_of_ptr,  # [E] int32
    span_ptr,  # [2] int32
    routes_ptr,
    expert_ptr,
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
    PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):
    tiles: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    place = tl.program_id(0) // tiles
    route = tl.load(routes_ptr + place).to(tl.int64)
    record, mine = _record(pool_ptr, slot_of_ptr, span_ptr, tl.load(expert_ptr + place), RECORD)
    if mine == 0:
        return
    x_row = mid_ptr + place.to(tl.int64) * I
    n = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, H - 1)[:, None]  # rows past the end are computed and not stored
    kk = tl.arange(0, BLOCK_K)[None, :]
    weight = tl.load(weights_ptr + route)
    factor = 1.0
    if GROUP:
        words: tl.constexpr = GROUP // 4  # of codes, under one scale
        g = tl.arange(0, BLOCK_K // words)[None, :]
        out = tl.zeros((BLOCK_N, BLOCK_K // words), tl.float32)
        codes_ptr = (record + FIELD).to(tl.pointer_type(tl.int32)) + row * (I // 8)
        scales_ptr = record + SCALES + row * (I // (2 * GROUP))
        for start in tl.range(0, I // 8, BLOCK_K, loop_unroll_factor=UNROLL):
            codes = tl.load(codes_ptr + start + kk, mask=start + kk < I // 8, other=0)
            scales = _scales(scales_ptr + start // words + g, start // words + g < I // (2 * GROUP), GROUP, FP8_TYPE)
            out += _products(codes, _eights(x_row, start, I // 8, BLOCK_K), words, PTX) * scales
        factor = _BACK
        if GROUP == NVFP4_GROUP:
            factor = tl.load((record + GLOBALS).to(tl.pointer_type(tl.float32))) * _BACK
        if QUANTISED:
            factor *= in_scale
        total = tl.sum(out, 1)
    elif FP8:
        columns: tl.constexpr = (I + SCALE_K - 1) // SCALE_K
        out = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        w_ptr = record + FIELD + row * I
        scales_ptr = (record + SCALES).to(tl.pointer_type(tl.float32)) + (row // SCALE_N) * columns
        for start in tl.range(0, I, BLOCK_K, loop_unroll_factor=UNROLL):
            x = tl.load(x_row + start + kk, mask=start + kk < I, other=0).to(tl.float32)
            out += _fp8_products(w_ptr, scales_ptr, x, start + kk, start, I, SCALE_K, BLOCK_K)
        total = tl.sum(out, 1)
        if SCALE_K >= I:
            total *= tl.load(tl.reshape(scales_ptr, (BLOCK_N,)))
    else:
        out = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        w_ptr = (record + FIELD).to(tl.pointer_type(mid_ptr.dtype.element_ty)) + row * I
        for start in tl.range(0, I, BLOCK_K, loop_unroll_factor=UNROLL):
            inside = start + kk < I
            w = tl.load(w_ptr + start + kk, mask=inside, other=0).to(tl.float32)
            out += w * tl.load(x_row + start + kk, mask=inside, other=0).to(tl.float32)
        total = tl.sum(out, 1)
    if BIASES:
        total *= factor
        total += tl.load((record + BIASES).to(tl.pointer_type(tl.float32)) + tl.minimum(n, H - 1))
        total *= weight
    else:
        total *= weight * factor
    tl.store(out_ptr + route * H + n, total.to(out_ptr.dtype.element_ty), mask=n < H)
