# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: whole rows in registers, read once; several short ones to a program."""

from typing import Any

import torch
import triton
import triton.language as tl

PROGRAM_ELEMENTS = 1024
"""Short rows are taken together up to this many elements, whatever the number of rows."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False) -> torch.Tensor:
    dtype = x.dtype if zero_centred else torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows = x.flatten(0, -3) if x.ndim > 3 else x if x.ndim == 3 else x.unsqueeze(-2).view(-1, 1, x.shape[-1])
    outer, inner, width = rows.shape
    arguments = launch_arguments(width, zero_centred)
    grid = (triton.cdiv(outer * inner, arguments["ROWS"]),)
    _rms_norm[grid](
        rows, weight.contiguous(), out, outer * inner, inner, rows.stride(0), rows.stride(1), eps, **arguments
    )
    return out


def launch_arguments(width: int, zero_centred: bool = False) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    rows = max(1, PROGRAM_ELEMENTS // block)
    return {
        "D": width,
        "ZERO_CENTRED": zero_centred,
        "BLOCK_D": block,
        "ROWS": rows,
        "num_warps": min(16, max(1, rows * block // 256)),
    }


@triton.jit
def normalised(x, sum_of_squares, eps, D: tl.constexpr):
    """x, float32, over the root of its mean square."""
    return x * tl.rsqrt(sum_of_squares / D + eps)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x_ptr,
    weight_ptr,  # [D]
    out_ptr,  # [rows, D]
    rows,
    inner,
    outer_stride,
    inner_stride,
    eps,
    D: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    first = (row // inner) * outer_stride + (row % inner) * inner_stride
    stored = tl.load(x_ptr + first[:, None] + column[None, :], mask=mask, other=0)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0).to(tl.float32)
    x = stored.to(tl.float32)
    x = normalised(x, tl.sum(x * x, axis=1)[:, None], eps, D)
    if ZERO_CENTRED:
        weight += 1.0
    else:
        x = x.to(stored.dtype).to(tl.float32)
    out = (x * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * D + column[None, :], out, mask=mask)
