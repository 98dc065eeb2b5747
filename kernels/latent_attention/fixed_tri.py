# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: latent attention with one order of sums, as kernels.attention.fixed_tri has it, whose merge it shares."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention.fixed_tri import ALIGNMENT, SHARE, merge, merge_arguments, rows_at_once, steady
from kernels.latent_attention import cost
from kernels.latent_attention.cost import Tile
from kernels.latent_attention.tri import LOG2_E, _attend, _store_partial, launch_arguments
from kernels.shared_memory import shared_nbytes


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    scale: float,
    tile: Tile | None = None,
    share: int = SHARE,
) -> torch.Tensor:
    """`tile` is that of `cost` unless given."""
    rows = q.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    table = pages.to(torch.int32)[None]
    lengths = torch.full((1,), start + rows, dtype=torch.int32, device=q.device)
    splits = triton.cdiv(start + rows, share)
    at_once = rows_at_once(q.shape[1], q.shape[2], splits)
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        span = (table, lengths, rows - part.stop)
        _attend_spans(q[part], q_rope[part], latent_pages, rope_pages, *span, scale, tile, share, splits, out[part])
    return out


def decode_latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    tile: Tile | None = None,
    share: int = SHARE,
) -> torch.Tensor:
    """`tile` is that of `cost` unless given."""
    rows = q.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    splits = max(1, triton.cdiv(table.shape[1] * latent_pages.shape[1], share))
    at_once = rows_at_once(q.shape[1], q.shape[2], splits)
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        spans = (table[part], lengths[part], 0)
        _attend_spans(q[part], q_rope[part], latent_pages, rope_pages, *spans, scale, tile, share, splits, out[part])
    return out


def _attend_spans(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    after: int,
    scale: float,
    tile: Tile | None,
    share: int,
    splits: int,
    out: torch.Tensor,
) -> None:
    """As kernels.attention.fixed_tri has it."""
    if q.numel() == 0:
        return
    (total, heads, rank), spans = q.shape, lengths.shape[0]
    rows = total // spans
    tile = tile or cost.tile(heads, q.element_size(), shared_nbytes(q.device))
    q, q_rope = steady(q), steady(q_rope)
    table, lengths = (x if x.data_ptr() % ALIGNMENT == 0 else x.clone() for x in (table.contiguous(), lengths))
    sums = torch.empty(total, heads, splits, rank, dtype=torch.float32, device=q.device)
    stats = torch.empty(total, heads, splits, 2, dtype=torch.float32, device=q.device)
    arguments = share_arguments(heads, latent_pages, rope_pages, tile, share)
    parts = arguments["BLOCK_R"] // arguments["BLOCK_V"]
    grid = (triton.cdiv(rows * heads, tile.block_m) * splits, parts, spans)
    _share[grid](
        q,
        q_rope,
        latent_pages,
        rope_pages,
        table,
        lengths,
        sums,
        stats,
        rows,
        after,
        splits,
        table.shape[1],
        scale * LOG2_E,
        **arguments,
    )
    merge(sums, stats, lengths, sums, out, rows, after, merge_arguments(heads, rank, share))


def share_arguments(
    heads: int, latent_pages: torch.Tensor, rope_pages: torch.Tensor, tile: Tile, share: int = SHARE
) -> dict[str, Any]:
    return launch_arguments(heads, latent_pages, rope_pages, tile, True) | {"SHARE": share}


@triton.jit(do_not_specialize=["rows", "after", "splits", "table_stride"])
def _share(
    q_ptr,  # [S * rows, HEADS, R]
    q_rope_ptr,  # [S * rows, HEADS, P]
    latent_ptr,  # [num_pages, PAGE_TOKENS, 1, R]
    rope_ptr,  # [num_pages, PAGE_TOKENS, 1, P]
    table_ptr,  # [S, X] int32
    lengths_ptr,  # [S] int32
    sums_ptr,  # [S * rows, HEADS, splits, R] float32
    stats_ptr,  # [S * rows, HEADS, splits, 2] float32
    rows,  # of a span
    after,  # positions of a span behind these rows
    splits,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SHARE: tl.constexpr,
):
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    part = tl.program_id(1)
    span = tl.program_id(2).to(tl.int64)
    start = tl.load(lengths_ptr + span) - after - rows
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pair // HEADS
    live = (row < rows) & (start + row >= 0)
    begin = split * SHARE
    end = start + tl.minimum(rows, (tile * BLOCK_M + BLOCK_M - 1) // HEADS + 1)
    end = tl.minimum(end, begin + SHARE)
    if begin >= end:
        return
    index = (span * rows + row) * HEADS + pair % HEADS
    acc, total, highest = _attend(
        q_ptr + (index * R)[:, None],
        q_rope_ptr + (index * P)[:, None],
        live,
        tl.where(live, start + row, -1),
        part,
        begin,
        end,
        table_ptr + span * table_stride,
        latent_ptr,
        rope_ptr,
        scale,
        R,
        P,
        PAGE_TOKENS,
        WIDE,
        BLOCK_R,
        BLOCK_P,
        CHUNK,
        BLOCK_V,
        BLOCK_N,
        STAGES,
    )
    _store_partial(sums_ptr, stats_ptr, index * splits + split, live, part, acc, total, highest, R, BLOCK_V)
