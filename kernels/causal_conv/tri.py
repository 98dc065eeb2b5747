# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: a program convolves the rows of one piece for some channels; then another keeps the states of each span."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.state_pieces import PIECE_ROWS, Pieces

BLOCK_C = 32
"""Channels of a program."""

STATE_BLOCK_C = 256
"""Of those that take one row, or none."""


def causal_conv(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    table, spans = pieces.table, pieces.spans
    if table.shape[0] == 0:
        return out
    x, weight = _contiguous_rows(x), weight.contiguous()
    channels, width = weight.shape
    grid = (table.shape[0], triton.cdiv(channels, BLOCK_C))
    _convolve[grid](x, weight, state, out, table, x.stride(0), state.stride(0), channels, **rows_arguments(width))
    # After it on the stream: a span's own state, from which its first rows were made, may be one that is kept.
    grid = (spans.shape[0] - 1, triton.cdiv(channels, STATE_BLOCK_C))
    _keep[grid](x, state, table, spans, x.stride(0), state.stride(0), channels, **state_arguments(width))
    return out


def causal_conv_step(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return out
    x, weight = _contiguous_rows(x), weight.contiguous()
    channels, width = weight.shape
    grid = (x.shape[0], triton.cdiv(channels, STATE_BLOCK_C))
    strides = (x.stride(0), state.stride(0), channels)
    _step[grid](x, weight, state, out, sources, targets, *strides, **state_arguments(width))
    return out


def rows_arguments(width: int) -> dict[str, Any]:
    return {"W": width, "BLOCK_R": PIECE_ROWS, "BLOCK_C": BLOCK_C, "num_warps": 8}


def state_arguments(width: int) -> dict[str, Any]:
    return {"W": width, "BLOCK_C": STATE_BLOCK_C, "num_warps": 4}


def _contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit(do_not_specialize=["channels"])
def _convolve(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, W]
    state_ptr,  # [slots, W - 1, C] float32
    out_ptr,  # [T, C]
    table_ptr,  # [P, 5] int32, see kernels.state_pieces
    x_stride,  # of a row
    slot_stride,
    channels,
    W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    piece = table_ptr + tl.program_id(0) * 5
    first = tl.load(piece).to(tl.int64)
    count = tl.load(piece + 1)
    span_first = tl.load(piece + 3).to(tl.int64)
    source = tl.load(piece + 4).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    row = first + r
    mask = (r < count)[:, None] & (channel < channels)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for j in tl.static_range(W):
        at = row - (W - 1) + j
        is_here = (at >= span_first)[:, None]
        here = tl.load(x_ptr + at[:, None] * x_stride + channel[None, :], mask=mask & is_here, other=0).to(tl.float32)
        old = W - 1 + at - span_first  # of the rows before the span, in its state
        states = state_ptr + source * slot_stride + old[:, None] * channels + channel[None, :]
        before = tl.load(states, mask=mask & (at < span_first)[:, None] & (source >= 0), other=0)
        tap = tl.load(weight_ptr + channel * W + j, mask=channel < channels, other=0).to(tl.float32)
        total += (here + before) * tap[None, :]
    out = total * tl.sigmoid(total)
    tl.store(out_ptr + row[:, None] * channels + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["channels"])
def _keep(
    x_ptr,  # [T, C]
    state_ptr,  # [slots, W - 1, C] float32
    table_ptr,  # [P, 5] int32
    spans_ptr,  # [N + 1] int32
    x_stride,
    slot_stride,
    channels,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    p = tl.load(spans_ptr + tl.program_id(0))
    end = tl.load(spans_ptr + tl.program_id(0) + 1)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    while p < end:
        piece = table_ptr + p * 5
        target = tl.load(piece + 2).to(tl.int64)
        span_first = tl.load(piece + 3).to(tl.int64)
        source = tl.load(piece + 4).to(tl.int64)
        done = tl.load(piece).to(tl.int64) + tl.load(piece + 1) - span_first
        if target >= 0:
            # In ascending order: a row that stays is read before it is written over, should they be the same slot's.
            for i in tl.static_range(W - 1):
                at = span_first + done - (W - 1) + i
                here = tl.load(x_ptr + at * x_stride + channel, mask=inside & (at >= span_first), other=0)
                is_old = (at < span_first) & (source >= 0)
                old = state_ptr + source * slot_stride + (done + i) * channels + channel
                before = tl.load(old, mask=inside & is_old, other=0)
                kept = state_ptr + target * slot_stride + i * channels + channel
                tl.store(kept, here.to(tl.float32) + before, mask=inside)
        p += 1


@triton.jit(do_not_specialize=["channels"])
def _step(
    x_ptr,  # [B, C]
    weight_ptr,  # [C, W]
    state_ptr,  # [slots, W - 1, C] float32
    out_ptr,  # [B, C]
    sources_ptr,  # [B] int32
    targets_ptr,  # [B] int32
    x_stride,
    slot_stride,
    channels,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(sources_ptr + row).to(tl.int64)
    target = tl.load(targets_ptr + row).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    old = state_ptr + source * slot_stride + channel
    kept = state_ptr + target * slot_stride + channel
    total = tl.zeros((BLOCK_C,), tl.float32)
    for j in tl.static_range(W):
        if j < W - 1:
            value = tl.load(old + j * channels, mask=inside & (source >= 0), other=0)
        else:
            value = tl.load(x_ptr + row * x_stride + channel, mask=inside, other=0).to(tl.float32)
        if j > 0:
            tl.store(kept + (j - 1) * channels, value, mask=inside & (target >= 0))
        total += value * tl.load(weight_ptr + channel * W + j, mask=inside, other=0).to(tl.float32)
    out = total * tl.sigmoid(total)
    tl.store(out_ptr + row * channels + channel, out.to(out_ptr.dtype.element_ty), mask=inside)
