# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: what all kernels of the gated delta rule make of their rows, in float32."""

import triton
import triton.language as tl


@triton.jit
def gates_of(a_rows, b_rows, a_log_ptr, dt_bias_ptr, head, mask):
    """g and beta of rows of one head; 0 where `mask` is not set."""
    x = tl.load(a_rows, mask=mask, other=0).to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    g = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * softplus
    beta = tl.sigmoid(tl.load(b_rows, mask=mask, other=0).to(tl.float32))
    return tl.where(mask, g, 0.0), tl.where(mask, beta, 0.0)


@triton.jit
def normalised_rows(rows, inside, EPS: tl.constexpr, K_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """[R, BLOCK_K]: the vectors of K_DIM that start at `rows` [R], over their lengths; 0 where not `inside`."""
    i = tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (i < K_DIM)[None, :]
    x = tl.load(rows[:, None] + i[None, :], mask=mask, other=0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + EPS)[:, None]


@triton.jit
def normalised_columns(rows, inside, EPS: tl.constexpr, K_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same, [BLOCK_K, R]."""
    i = tl.arange(0, BLOCK_K)
    mask = (i < K_DIM)[:, None] & inside[None, :]
    x = tl.load(rows[None, :] + i[:, None], mask=mask, other=0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + EPS)[None, :]
