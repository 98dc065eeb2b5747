# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: a program normalises and turns a few heads of one token, of q or of k, in registers."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.norm.tri import normalised

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
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, head_dim = q.shape
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    arguments = launch_arguments(heads, k.shape[1], head_dim, q_weight is not None, k_weight is not None)
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


def launch_arguments(heads: int, kv_heads: int, head_dim: int, norm_q: bool, norm_k: bool) -> dict[str, Any]:
    block = triton.next_power_of_2(head_dim // 2)
    rows = max(1, min(PROGRAM_ELEMENTS // (2 * block), triton.next_power_of_2(heads)))
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "NORM_Q": norm_q,
        "NORM_K": norm_k,
        "HALF": head_dim // 2,
        "BLOCK_HALF": block,
        "ROWS": rows,
        "num_warps": min(8, max(1, rows * block // 256)),
    }


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
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    i = tl.arange(0, BLOCK_HALF)
    inside = i < HALF
    mask = (head < HEADS)[:, None] & inside[None, :]
    rows = x_ptr + head[:, None] * stride + i[None, :]
    stored = tl.load(rows, mask=mask, other=0)
    first = stored.to(tl.float32)
    second = tl.load(rows + HALF, mask=mask, other=0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)[:, None]
        # Rounded where the reference rounds: when it is normalised, and when it is scaled.
        first = normalised(first, squares, eps, 2 * HALF).to(stored.dtype).to(tl.float32)
        second = normalised(second, squares, eps, 2 * HALF).to(stored.dtype).to(tl.float32)
        weight = weight_ptr + i
        first = (first * tl.load(weight, mask=inside, other=0).to(tl.float32)[None, :]).to(stored.dtype)
        second = (second * tl.load(weight + HALF, mask=inside, other=0).to(tl.float32)[None, :]).to(stored.dtype)
        first = first.to(tl.float32)
        second = second.to(tl.float32)
    cos = tl.load(cos_ptr + i, mask=inside, other=0)[None, :]
    sin = tl.load(sin_ptr + i, mask=inside, other=0)[None, :]
    out = out_ptr + head[:, None] * (2 * HALF) + i[None, :]
    tl.store(out, (first * cos - second * sin).to(stored.dtype), mask=mask)
    tl.store(out + HALF, (second * cos + first * sin).to(stored.dtype), mask=mask)


@triton.jit
def _norm_rope(
    q_ptr,
    k_ptr,
    q_weight_ptr,  # [D], or anything
    k_weight_ptr,
    cos_ptr,  # [T, D / 2] float32
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
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    cos = cos_ptr + token * HALF
    sin = sin_ptr + token * HALF
    row = tl.arange(0, ROWS)
    if part < q_parts:
        out = q_out_ptr + token * (HEADS * 2 * HALF)
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
            HALF,
            BLOCK_HALF,
        )
    else:
        out = k_out_ptr + token * (KV_HEADS * 2 * HALF)
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
            HALF,
            BLOCK_HALF,
        )
