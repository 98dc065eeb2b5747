# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: heads normalised and scaled by the SiLU of their gate, several to a program."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.norm.tri import PROGRAM_ELEMENTS, normalised


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, gate = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, gate))
    tokens, heads, width = x.shape
    arguments = launch_arguments(width)
    _gated_rms_norm[(triton.cdiv(tokens * heads, arguments["ROWS"]),)](
        x,
        gate,
        weight.contiguous(),
        out,
        tokens * heads,
        heads,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
        eps,
        **arguments,
    )
    return out


def launch_arguments(width: int) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    rows = max(1, PROGRAM_ELEMENTS // block)
    return {"D": width, "BLOCK_D": block, "ROWS": rows, "num_warps": min(16, max(1, rows * block // 256))}


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm(
    x_ptr,
    gate_ptr,
    weight_ptr,  # [D]
    out_ptr,  # [rows, D]
    rows,
    heads,
    x_stride,  # of a token
    x_head_stride,
    gate_stride,
    gate_head_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    token, head = row // heads, row % heads
    stored = tl.load(x_ptr + (token * x_stride + head * x_head_stride)[:, None] + column[None, :], mask=mask, other=0)
    gates = gate_ptr + (token * gate_stride + head * gate_head_stride)[:, None] + column[None, :]
    gate = tl.load(gates, mask=mask, other=0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0).to(tl.float32)
    x = stored.to(tl.float32)
    x = normalised(x, tl.sum(x * x, axis=1)[:, None], eps, D).to(stored.dtype).to(tl.float32)
    x = (x * weight[None, :]).to(stored.dtype).to(tl.float32)  # rounded where the reference rounds
    out = x * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + row[:, None] * D + column[None, :], out.to(stored.dtype), mask=mask)
