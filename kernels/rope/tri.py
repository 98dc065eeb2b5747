# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: a program normalises and turns a few heads of one token, of q or of k, in registers."""

from typing import Any

import torch
import triton
import triton.language as tl

PROGRAM_ELEMENTS = 1024
"""Heads are taken together up to this many elements, whatever the number of tokens."""


def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    zero_centred: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, head_dim = q.shape
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    normed = (q_weight is not None, k_weight is not None)
    arguments = launch_arguments(heads, k.shape[1], head_dim, *normed, cos.shape[1], zero_centred)
    programs = triton.cdiv(heads, arguments["ROWS"]) + triton.cdiv(k.shape[1], arguments["ROWS"])
    _norm_rope[(tokens, programs)](
        q,
        k,
        q if q_weight is None else q_weight.contiguous(),
        k if k_weight is None else k_weight.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        q_out,
        k_out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        eps,
        **arguments,
    )
    return q_out, k_out


def launch_arguments(
    heads: int, kv_heads: int, head_dim: int, norm_q: bool, norm_k: bool, half: int = 0, zero_centred: bool = False
) -> dict[str, Any]:
    """`half` of the rotated elements of a head; 0: all are."""
    half = half or head_dim // 2
    block, rest = triton.next_power_of_2(half), head_dim - 2 * half
    rest_block = triton.next_power_of_2(rest) if rest else 0
    fitting = max(1, PROGRAM_ELEMENTS // (2 * block + rest_block))
    rows = min(2 ** (fitting.bit_length() - 1), triton.next_power_of_2(heads))  # a power of two, rounded down
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "NORM_Q": norm_q,
        "NORM_K": norm_k,
        "ZERO_CENTRED": zero_centred,
        "HALF": half,
        "BLOCK_HALF": block,
        "REST": rest,
        "BLOCK_REST": rest_block,
        "ROWS": rows,
        "num_warps": min(8, max(1, rows * (block + rest_block // 2) // 256)),
    }


@triton.jit
def _scaled(x, weight_ptr, inside, factor, ZERO_CENTRED: tl.constexpr, DTYPE: tl.constexpr):
    """What `rms_norm` makes of x, float32, that is normalised times `factor`; rounded where the reference rounds."""
    weight = tl.load(weight_ptr, mask=inside, other=0).to(tl.float32)[None, :]
    x = x * factor
    if ZERO_CENTRED:
        weight += 1.0
    else:
        x = x.to(DTYPE).to(tl.float32)
    return (x * weight).to(DTYPE).to(tl.float32)


@triton.jit
def _turn(
    x_ptr,  # of the token
    weight_ptr,
    cos_ptr,  # of the token
    sin_ptr,
    out_ptr,  # of the token
    head,
    stride,
    eps,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    i = tl.arange(0, BLOCK_HALF)
    inside = i < HALF
    mask = (head < HEADS)[:, None] & inside[None, :]
    rows = x_ptr + head[:, None] * stride + i[None, :]
    out = out_ptr + head[:, None] * (2 * HALF + REST) + i[None, :]
    stored = tl.load(rows, mask=mask, other=0)
    first = stored.to(tl.float32)
    second = tl.load(rows + HALF, mask=mask, other=0).to(tl.float32)
    squares = tl.sum(first * first + second * second, axis=1)[:, None]
    if REST:
        j = 2 * HALF + tl.arange(0, BLOCK_REST)
        is_rest = j < 2 * HALF + REST
        rest_mask = (head < HEADS)[:, None] & is_rest[None, :]
        rest = tl.load(x_ptr + head[:, None] * stride + j[None, :], mask=rest_mask, other=0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)[:, None]
    if NORM:
        factor = tl.rsqrt(squares / (2 * HALF + REST) + eps)
        first = _scaled(first, weight_ptr + i, inside, factor, ZERO_CENTRED, stored.dtype)
        second = _scaled(second, weight_ptr + HALF + i, inside, factor, ZERO_CENTRED, stored.dtype)
        if REST:
            rest = _scaled(rest, weight_ptr + j, is_rest, factor, ZERO_CENTRED, stored.dtype)
    cos = tl.load(cos_ptr + i, mask=inside, other=0)[None, :]
    sin = tl.load(sin_ptr + i, mask=inside, other=0)[None, :]
    tl.store(out, (first * cos - second * sin).to(stored.dtype), mask=mask)
    tl.store(out + HALF, (second * cos + first * sin).to(stored.dtype), mask=mask)
    if REST:
        tl.store(out_ptr + head[:, None] * (2 * HALF + REST) + j[None, :], rest.to(stored.dtype), mask=rest_mask)


@triton.jit
def _norm_rope(
    q_ptr,
    k_ptr,
    q_weight_ptr,  # [D], or anything
    k_weight_ptr,
    cos_ptr,  # [T, HALF] float32
    sin_ptr,
    q_out_ptr,  # [T, HEADS, D]
    k_out_ptr,  # [T, KV_HEADS, D]
    q_stride,  # of a token
    q_head_stride,
    k_stride,
    k_head_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    cos = cos_ptr + token * HALF
    sin = sin_ptr + token * HALF
    row = tl.arange(0, ROWS)
    if part < q_parts:
        out = q_out_ptr + token * (HEADS * (2 * HALF + REST))
        head = part * ROWS + row
        _turn(
            q_ptr + token * q_stride,
            q_weight_ptr,
            cos,
            sin,
            out,
            head,
            q_head_stride,
            eps,
            HEADS,
            NORM_Q,
            ZERO_CENTRED,
            HALF,
            BLOCK_HALF,
            REST,
            BLOCK_REST,
        )
    else:
        out = k_out_ptr + token * (KV_HEADS * (2 * HALF + REST))
        head = (part - q_parts) * ROWS + row
        _turn(
            k_ptr + token * k_stride,
            k_weight_ptr,
            cos,
            sin,
            out,
            head,
            k_head_stride,
            eps,
            KV_HEADS,
            NORM_K,
            ZERO_CENTRED,
            HALF,
            BLOCK_HALF,
            REST,
            BLOCK_REST,
        )
