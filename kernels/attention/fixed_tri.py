# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: attention with one order of sums, for prefill chunks and decode steps by the same two kernels.

The context is cut at multiples of SHARE positions; a program takes some rows of one span (a chunk's rows, or a decode
step's one row of a sequence) through one share, and a second kernel merges each row's shares in their order, only those
that the row sees. Nothing is compiled for rows, lengths or the number of spans, so that every row of every step goes
through the same instructions.

Partial sums are held for so many rows at a time that they stay within PARTIAL_NBYTES.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention import cost
from kernels.attention.cost import Tile
from kernels.attention.tri import LOG2_E, LOG2_E_OF_SINKS, _attend, _store_partial, launch_arguments
from kernels.shared_memory import shared_nbytes

SHARE = 512
"""Positions: as many as are worth a program, and few enough for the programs of one sequence to be many."""
PARTIAL_NBYTES = 32 << 20
"""Of partial sums, as long as one row's are no more: what cuBLAS would work in, whose memory is planned for, and which
a model with a fixed order of sums does not call."""
ALIGNMENT = 16
"""Bytes: of a q that starts elsewhere Triton would compile another kernel."""
MERGE_COLUMNS = tl.constexpr(64)
"""Of D, for each program that merges."""


class Shares(NamedTuple):
    """How a context is taken in; `tile` as it is given, `splits` the shares of the longest context of a launch."""

    scale: float
    window: int | None
    sinks: torch.Tensor | None  # [heads] float32
    tile: Tile | None
    share: int
    splits: int


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    tile: Tile | None = None,
    share: int = SHARE,
) -> torch.Tensor:
    """`tile` is that of `fixed_tile` unless given."""
    rows = q.shape[0]
    out = torch.empty(rows, q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    table = pages.to(torch.int32)[None]
    lengths = torch.full((1,), start + rows, dtype=torch.int32, device=q.device)
    splits = triton.cdiv(start + rows, share)
    at_once = rows_at_once(q.shape[1], q.shape[2], splits)
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        shares = Shares(scale, window, sinks, tile, share, splits)
        _attend_spans(q[part], k_pages, v_pages, table, lengths, rows - part.stop, shares, out[part])
    return out


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    tile: Tile | None = None,
    share: int = SHARE,
) -> torch.Tensor:
    """`tile` is that of `fixed_tile` unless given."""
    rows = q.shape[0]
    out = torch.empty(rows, q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    splits = max(1, triton.cdiv(table.shape[1] * k_pages.shape[1], share))
    at_once = rows_at_once(q.shape[1], q.shape[2], splits)
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        shares = Shares(scale, window, sinks, tile, share, splits)
        _attend_spans(q[part], k_pages, v_pages, table[part], lengths[part], 0, shares, out[part])
    return out


def _attend_spans(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    after: int,
    shares: Shares,
    out: torch.Tensor,
) -> None:
    """Rows of S spans, equally many of each, whose last one is `after` positions before its span's end: `table` [S, P]
    int32, `lengths` [S] int32. The result goes to `out`."""
    if q.numel() == 0:
        return
    (total, heads, head_dim), spans, kv_heads = q.shape, lengths.shape[0], k_pages.shape[2]
    scale, window, sinks, tile, share, splits = shares
    rows, group = total // spans, heads // kv_heads
    tile = tile or fixed_tile(group, head_dim, q.element_size(), shared_nbytes(q.device))
    q = steady(q)
    table, lengths = (x if x.data_ptr() % ALIGNMENT == 0 else x.clone() for x in (table.contiguous(), lengths))
    sums = torch.empty(total, heads, splits, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(total, heads, splits, 2, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(rows * group, tile.block_m) * splits, kv_heads, spans)
    _share[grid](
        q,
        k_pages,
        v_pages,
        table,
        lengths,
        sums,
        stats,
        rows,
        after,
        splits,
        table.shape[1],
        scale * LOG2_E,
        **share_arguments(heads, k_pages, tile, share, window),
    )
    sink = sums if sinks is None else sinks
    merge(
        sums, stats, lengths, sink, out, rows, after, merge_arguments(heads, head_dim, share, window, sinks is not None)
    )


def merge(
    sums: torch.Tensor,
    stats: torch.Tensor,
    lengths: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    after: int,
    arguments: dict[str, Any],
) -> None:
    """The second kernel: `out` [n, HEADS * D] of `sums` [n, HEADS, splits, D] and `stats` [n, HEADS, splits, 2]."""
    total, heads, splits, width = sums.shape
    grid = (total * heads, triton.cdiv(width, MERGE_COLUMNS.value))
    _merge[grid](sums, stats, lengths, sinks, out, rows, after, splits, **arguments)


def fixed_tile(group: int, head_dim: int, itemsize: int, shared_nbytes: int) -> Tile:
    """From the model and the GPU alone: that of a chunk whose context is in parts, and of float32, which has no matrix
    instructions to fill, that of a decode step."""
    if itemsize == 4:
        return cost.decode_plan(group, 1, head_dim, itemsize, shared_nbytes)[0]
    return cost.prefill_tiles(head_dim, itemsize, shared_nbytes)[1]


def rows_at_once(heads: int, width: int, splits: int) -> int:
    """Rows whose partial sums of `splits` shares are held at a time."""
    return max(1, PARTIAL_NBYTES // (4 * heads * splits * (width + 2)))


def steady(q: torch.Tensor) -> torch.Tensor:
    """`q` in a form of which there is one, whatever it is a view of."""
    q = q.contiguous()
    return q if q.data_ptr() % ALIGNMENT == 0 else q.clone()


def share_arguments(
    heads: int, k_pages: torch.Tensor, tile: Tile, share: int = SHARE, window: int | None = None
) -> dict[str, Any]:
    """Offsets may always be wide: whether they are must not depend on the number of rows."""
    return launch_arguments(heads, k_pages, tile, True, window) | {"SHARE": share}


def merge_arguments(
    heads: int, width: int, share: int = SHARE, window: int | None = None, sinks: bool = False
) -> dict[str, Any]:
    return {"HEADS": heads, "D": width, "SHARE": share, "WINDOW": window or 0, "SINKS": sinks, "num_warps": 1}


@triton.jit(do_not_specialize=["rows", "after", "splits", "table_stride"])
def _share(
    q_ptr,  # [S * rows, KV_HEADS * GROUP, D]
    k_ptr,  # [num_pages, PAGE_TOKENS, KV_HEADS, D]
    v_ptr,
    table_ptr,  # [S, P] int32
    lengths_ptr,  # [S] int32
    sums_ptr,  # [S * rows, KV_HEADS * GROUP, splits, D] float32
    stats_ptr,  # [S * rows, KV_HEADS * GROUP, splits, 2] float32
    rows,  # of a span
    after,  # positions of a span behind these rows
    splits,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SHARE: tl.constexpr,
):
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    kv_head = tl.program_id(1)
    span = tl.program_id(2).to(tl.int64)
    start = tl.load(lengths_ptr + span) - after - rows
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pair // GROUP
    live = (row < rows) & (start + row >= 0)
    head = kv_head * GROUP + pair % GROUP
    begin = split * SHARE
    if WINDOW > 0:  # of the first row; the others see no position before
        begin = tl.maximum(begin, tl.maximum(start + tile * BLOCK_M // GROUP - WINDOW + 1, 0) // BLOCK_N * BLOCK_N)
    end = start + tl.minimum(rows, (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    end = tl.minimum(end, split * SHARE + SHARE)
    if begin >= end:
        return
    index = (span * rows + row) * (KV_HEADS * GROUP) + head
    acc, total, highest = _attend(
        q_ptr + (index * D)[:, None],
        live,
        tl.where(live, start + row, -1),
        begin,
        end,
        table_ptr + span * table_stride,
        k_ptr + kv_head * D,
        v_ptr + kv_head * D,
        scale,
        D,
        PAGE_TOKENS,
        KV_HEADS * D,
        WIDE,
        WINDOW,
        BLOCK_D,
        CHUNK,
        BLOCK_N,
        STAGES,
    )
    _store_partial(sums_ptr, stats_ptr, index * splits + split, live, acc, total, highest, D, BLOCK_D)


@triton.jit(do_not_specialize=["rows", "after", "splits"])
def _merge(
    sums_ptr,  # [S * rows, HEADS, splits, D] float32
    stats_ptr,  # [S * rows, HEADS, splits, 2] float32
    lengths_ptr,  # [S] int32
    sinks_ptr,  # [HEADS] float32
    out_ptr,  # [S * rows, HEADS * D]
    rows,
    after,
    splits,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SHARE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = index // HEADS
    span = row // rows
    position = tl.load(lengths_ptr + span) - after - rows + (row - span * rows).to(tl.int32)
    d = tl.program_id(1) * MERGE_COLUMNS + tl.arange(0, MERGE_COLUMNS)
    acc = tl.zeros((MERGE_COLUMNS,), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    highest = tl.full((), float("-inf"), tl.float32)
    split = position * 0
    if WINDOW > 0:
        split = tl.maximum(position - WINDOW + 1, 0) // SHARE
    while split * SHARE <= position:
        of_share = tl.load(stats_ptr + (index * splits + split) * 2)
        sums = tl.load(sums_ptr + (index * splits + split) * D + d, mask=d < D, other=0)
        higher = tl.maximum(highest, of_share)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp2(highest - base), tl.exp2(of_share - base)
        acc = acc * shrink + sums * weight
        total = total * shrink + tl.load(stats_ptr + (index * splits + split) * 2 + 1) * weight
        highest = higher
        split += 1
    if SINKS:
        sink = tl.load(sinks_ptr + index % HEADS) * LOG2_E_OF_SINKS
        base = tl.maximum(highest, sink)
        acc *= tl.exp2(highest - base)
        total = total * tl.exp2(highest - base) + tl.exp2(sink - base)
    out = acc / tl.where(position >= 0, total, 1.0)
    out = tl.where(out == 0, 0.0, out)  # a sum of nothing but zeros may have either sign
    tl.store(out_ptr + index * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
