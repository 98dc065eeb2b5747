# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: a program takes one token into some columns of one head's state of one sequence."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gated_delta.ref import NORM_EPS
from kernels.gated_delta.tokens import Gates, Tokens
from kernels.gated_delta.tri_rows import gates_of

BLOCK_V = 32
"""Columns of the state of a program."""


def gated_delta_step(
    tokens: Tokens, gates: Gates, state: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    q, k, v, a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in tokens)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    (_, key_heads, k_dim), (rows, heads, v_dim) = k.shape, v.shape
    if rows == 0:
        return out
    _take_in[(triton.cdiv(v_dim, BLOCK_V), heads, rows)](
        q,
        k,
        v,
        a,
        b,
        gates.a_log,
        gates.dt_bias,
        state,
        out,
        sources,
        targets,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        a.stride(0),
        b.stride(0),
        state.stride(0),
        **launch_arguments(key_heads, heads, k_dim, v_dim),
    )
    return out


def launch_arguments(key_heads: int, heads: int, k_dim: int, v_dim: int) -> dict[str, Any]:
    return {
        "HEADS": heads,
        "SHARED": heads // key_heads,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "EPS": NORM_EPS,
        "BLOCK_K": triton.next_power_of_2(k_dim),
        "BLOCK_V": BLOCK_V,
        "num_warps": 4,
    }


@triton.jit
def _take_in(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,  # [T, HEADS]
    b_ptr,
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,
    state_ptr,  # [slots, HEADS, K_DIM, V_DIM] float32, strided by slot
    out_ptr,  # [T, HEADS, V_DIM]
    sources_ptr,  # [T] int32
    targets_ptr,  # [T] int32
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    source = tl.load(sources_ptr + row).to(tl.int64)
    target = tl.load(targets_ptr + row).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (i < K_DIM)[:, None] & (column < V_DIM)[None, :]
    place = head * (K_DIM * V_DIM) + i[:, None] * V_DIM + column[None, :]
    s = tl.load(state_ptr + source * SLOT_STRIDE + place, mask=in_state & (source >= 0), other=0)
    q = tl.load(q_ptr + row * Q_STRIDE + (head // SHARED) * Q_HEAD_STRIDE + i, mask=i < K_DIM, other=0).to(tl.float32)
    k = tl.load(k_ptr + row * K_STRIDE + (head // SHARED) * K_HEAD_STRIDE + i, mask=i < K_DIM, other=0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + EPS) / tl.sqrt(K_DIM * 1.0)
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
    v = tl.load(v_ptr + row * V_STRIDE + head * V_HEAD_STRIDE + column, mask=column < V_DIM, other=0).to(tl.float32)
    g, beta = gates_of(
        a_ptr + row * A_STRIDE + head, b_ptr + row * B_STRIDE + head, a_log_ptr, dt_bias_ptr, head, row >= 0
    )
    s *= tl.exp(g)
    u = beta * (v - tl.sum(k[:, None] * s, axis=0))
    s += k[:, None] * u[None, :]
    out = tl.sum(q[:, None] * s, axis=0)
    tl.store(out_ptr + (row * HEADS + head) * V_DIM + column, out.to(out_ptr.dtype.element_ty), mask=column < V_DIM)
    tl.store(state_ptr + target * SLOT_STRIDE + place, s, mask=in_state & (target >= 0))
