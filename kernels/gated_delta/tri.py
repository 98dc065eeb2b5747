# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: one launch solves the pieces' systems, all at once; another takes each span through its pieces in order."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gated_delta.ref import NORM_EPS
from kernels.gated_delta.tokens import Gates, Tokens
from kernels.gated_delta.tri_rows import gates_of, normalised_columns, normalised_rows
from kernels.state_pieces import PIECE_ROWS, Pieces

BLOCK_V = 32
"""Columns of the state that a program has: all rows of them stay in registers."""

SOLVE_WARPS, ADVANCE_WARPS = 4, 8
"""With which fewest registers are spilled (bfloat16, heads of 128: none and 30 a thread on sm_90, by ptxas)."""


def gated_delta(tokens: Tokens, gates: Gates, state: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    q, k, v, a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in tokens)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    table, spans = pieces.table, pieces.spans
    count, (_, key_heads, k_dim), (_, heads, v_dim) = table.shape[0], k.shape, v.shape
    if count == 0:
        return out
    solved, scores = torch.empty(2, count, heads, PIECE_ROWS, PIECE_ROWS, dtype=torch.float32, device=v.device)
    totals = torch.empty(count, heads, PIECE_ROWS, dtype=torch.float32, device=v.device)
    arguments = launch_arguments(key_heads, heads, k_dim, v.dtype == torch.float32)
    _solve[(count, heads)](
        q,
        k,
        a,
        b,
        gates.a_log,
        gates.dt_bias,
        table,
        solved,
        scores,
        totals,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        a.stride(0),
        b.stride(0),
        **arguments,
        num_warps=SOLVE_WARPS,
    )
    _advance[(triton.cdiv(v_dim, BLOCK_V), heads, spans.shape[0] - 1)](
        q,
        k,
        v,
        state,
        out,
        table,
        spans,
        solved,
        scores,
        totals,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        state.stride(0),
        **arguments,
        V_DIM=v_dim,
        BLOCK_V=BLOCK_V,
        num_warps=ADVANCE_WARPS,
    )
    return out


def launch_arguments(key_heads: int, heads: int, k_dim: int, exact: bool) -> dict[str, Any]:
    """`exact` products for float32, of three of TF32 each; 16-bit numbers fit in one."""
    return {
        "HEADS": heads,
        "SHARED": heads // key_heads,
        "K_DIM": k_dim,
        "EPS": NORM_EPS,
        "ROWS": PIECE_ROWS,
        "BLOCK_K": max(16, triton.next_power_of_2(k_dim)),
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_stages": 1,
    }


@triton.jit
def _solve(
    q_ptr,
    k_ptr,
    a_ptr,  # [T, HEADS]
    b_ptr,
    a_log_ptr,  # [HEADS]
    dt_bias_ptr,
    table_ptr,  # [P, 5] int32, see kernels.state_pieces
    solved_ptr,  # [P, HEADS, ROWS, ROWS] float32
    scores_ptr,  # [P, HEADS, ROWS, ROWS] float32
    totals_ptr,  # [P, HEADS, ROWS] float32
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    K_DIM: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The running sum of g; the matrix that makes u of what `ref.chunk` has in brackets behind beta; what u is weighted
    by in each row's output."""
    p = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(table_ptr + p * 5).to(tl.int64)
    count = tl.load(table_ptr + p * 5 + 1)
    r = tl.arange(0, ROWS)
    inside = r < count
    g, beta = gates_of(
        a_ptr + (first + r) * A_STRIDE + head,
        b_ptr + (first + r) * B_STRIDE + head,
        a_log_ptr,
        dt_bias_ptr,
        head,
        inside,
    )
    total = tl.cumsum(g, axis=0)
    rows = k_ptr + (first + r) * K_STRIDE + (head // SHARED) * K_HEAD_STRIDE
    k = normalised_rows(rows, inside, EPS, K_DIM, BLOCK_K)
    place = p.to(tl.int64) * HEADS + head
    square = place * (ROWS * ROWS) + r[:, None] * ROWS + r[None, :]
    rows = q_ptr + (first + r) * Q_STRIDE + (head // SHARED) * Q_HEAD_STRIDE
    q = normalised_rows(rows, inside, EPS, K_DIM, BLOCK_K) / tl.sqrt(K_DIM * 1.0)
    causal = r[:, None] >= r[None, :]
    decay = tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0))
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    tl.store(scores_ptr + square, tl.where(causal, scores * decay, 0.0))
    similar = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    earlier = r[:, None] > r[None, :]
    system = tl.where(earlier, beta[:, None] * similar * decay, 0.0)
    # Row i of the inverse of I + system, from the rows above it: substitution, since powers of it may be huge.
    inverse = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for i in range(1, ROWS):
        here = r == i
        weights = tl.sum(tl.where(here[:, None], system, 0.0), axis=0)
        above = tl.sum(weights[:, None] * inverse, axis=0)
        inverse = tl.where(here[:, None], inverse - above[None, :], inverse)
    tl.store(solved_ptr + square, inverse * beta[None, :])
    tl.store(totals_ptr + place * ROWS + r, total)


@triton.jit
def _advance(
    q_ptr,
    k_ptr,
    v_ptr,
    state_ptr,  # [slots, HEADS, K_DIM, V_DIM] float32, strided by slot
    out_ptr,  # [T, HEADS, V_DIM]
    table_ptr,
    spans_ptr,  # [N + 1] int32
    solved_ptr,
    scores_ptr,
    totals_ptr,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    K_DIM: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(1)
    p = tl.load(spans_ptr + tl.program_id(2))
    end = tl.load(spans_ptr + tl.program_id(2) + 1)
    r = tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (i < K_DIM)[:, None] & (column < V_DIM)[None, :]
    place = head * (K_DIM * V_DIM) + i[:, None] * V_DIM + column[None, :]
    source = tl.load(table_ptr + p * 5 + 4).to(tl.int64)
    s = tl.load(state_ptr + source * SLOT_STRIDE + place, mask=in_state & (source >= 0), other=0)
    while p < end:
        first = tl.load(table_ptr + p * 5).to(tl.int64)
        count = tl.load(table_ptr + p * 5 + 1)
        target = tl.load(table_ptr + p * 5 + 2).to(tl.int64)
        inside = r < count
        solved_at = p.to(tl.int64) * HEADS + head
        total = tl.load(totals_ptr + solved_at * ROWS + r)
        last = tl.load(totals_ptr + solved_at * ROWS + ROWS - 1)  # rows past the end do not decay
        square = solved_at * (ROWS * ROWS) + r[:, None] * ROWS + r[None, :]
        reach = tl.exp(total)[:, None]
        k_rows = k_ptr + (first + r) * K_STRIDE + (head // SHARED) * K_HEAD_STRIDE
        mask = inside[:, None] & (column < V_DIM)[None, :]
        v_rows = v_ptr + (first + r)[:, None] * V_STRIDE + head * V_HEAD_STRIDE + column[None, :]
        right = tl.load(v_rows, mask=mask, other=0).to(tl.float32)
        k = normalised_rows(k_rows, inside, EPS, K_DIM, BLOCK_K)
        right -= reach * tl.dot(k, s, input_precision=PRECISION)
        u = tl.dot(tl.load(solved_ptr + square), right, input_precision=PRECISION)
        q_rows = q_ptr + (first + r) * Q_STRIDE + (head // SHARED) * Q_HEAD_STRIDE
        q = normalised_rows(q_rows, inside, EPS, K_DIM, BLOCK_K) * (reach / tl.sqrt(K_DIM * 1.0))
        out = tl.dot(q, s, input_precision=PRECISION)
        out += tl.dot(tl.load(scores_ptr + square), u, input_precision=PRECISION)
        outs = out_ptr + (first + r)[:, None] * (HEADS * V_DIM) + head * V_DIM + column[None, :]
        tl.store(outs, out.to(out_ptr.dtype.element_ty), mask=mask)
        # Read once more, as columns: kept from above they would take registers all the while.
        left = normalised_columns(k_rows, inside, EPS, K_DIM, BLOCK_K) * tl.exp(last - total)[None, :]
        s = tl.exp(last) * s + tl.dot(left, u, input_precision=PRECISION)
        if target >= 0:
            tl.store(state_ptr + target * SLOT_STRIDE + place, s, mask=in_state)
        p += 1
