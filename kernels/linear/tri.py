# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: W x^T by one tile whatever the number of rows, each sum in the order of k, in float32.

The weight is the left operand, as in grouped_gemm: its rows fill a matrix instruction, however few rows x has. No
argument that changes with the number of rows is compiled for, so that there is one kernel for all of them.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.linear import cost
from kernels.linear.cost import Tile

ALIGNMENT = 16
"""Bytes: of an x that starts elsewhere Triton would compile another kernel."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None = None) -> torch.Tensor:
    """`tile` is that of `cost` unless given."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x[:, None], weight, (0, weight.stride(0), weight.stride(1)), bias, out[:, None], tile)
    return out


def heads_linear(x: torch.Tensor, weight: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
    """`tile` as for `linear`."""
    out = torch.empty(x.shape[0], x.shape[1], weight.shape[2], dtype=x.dtype, device=x.device)
    _launch(x, weight, (weight.stride(0), weight.stride(2), weight.stride(1)), None, out, tile)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    strides: tuple[int, int, int],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile | None,
) -> None:
    """x [T, heads, K], out [T, heads, N]; `strides` of a head, a row and a column of the weight."""
    if out.numel() == 0:
        return
    x = x.contiguous()
    x = x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
    tokens, heads, columns = x.shape
    tile = tile or cost.tile(out.shape[2], x.element_size())
    options = launch_arguments(heads, columns, out.shape[2], bias is not None, tile)
    grid = (triton.cdiv(out.shape[2], tile.block_n) * triton.cdiv(tokens, tile.block_m), heads)
    _linear[grid](x, weight, out if bias is None else bias, out, tokens, *strides, **options)


def launch_arguments(heads: int, columns: int, out_features: int, bias: bool, tile: Tile) -> dict[str, Any]:
    return {
        "HEADS": heads,
        "K": columns,
        "N": out_features,
        "BIAS": bias,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


@triton.jit
def _step(acc, w_rows, x_rows, live, start, w_stride, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Takes in the columns start .. start + BLOCK_K - 1."""
    k = start + tl.arange(0, BLOCK_K)
    w = tl.load(w_rows + k[None, :] * w_stride, mask=(k < K)[None, :], other=0)
    x = tl.load(x_rows + k[:, None], mask=(k < K)[:, None] & live[None, :], other=0)
    return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x_ptr,  # [T, HEADS, K]
    w_ptr,  # [HEADS, N, K], strided
    bias_ptr,  # [N]
    out_ptr,  # [T, HEADS, N]
    tokens,
    w_head_stride,
    w_row_stride,
    w_stride,  # of a column
    HEADS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    head = tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = token < tokens
    row = tl.minimum(n, N - 1).to(tl.int64)  # rows past the end are computed and not stored
    w_rows = w_ptr + head * w_head_stride + row[:, None] * w_row_stride
    x_rows = x_ptr + (token[None, :] * HEADS + head) * K
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if STAGES > 0:
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            acc = _step(acc, w_rows, x_rows, live, start, w_stride, K, BLOCK_K)
    else:
        for start in range(0, K, BLOCK_K):
            acc = _step(acc, w_rows, x_rows, live, start, w_stride, K, BLOCK_K)
    if BIAS:
        acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    where = out_ptr + (token[None, :] * HEADS + head) * N + n[:, None]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])
