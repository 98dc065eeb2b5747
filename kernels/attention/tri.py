# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: flash attention that finds keys and values by page table, for prefill chunks and for decode steps.

A program has the heads of one kv head as rows, so that keys and values are read once for all of them: of a decode
step's sequence those of its new token, of a chunk as many neighbouring (token, head) pairs as a tile holds. The context
may be split among programs, whose partial sums a second kernel merges.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention import cost
from kernels.attention.cost import Tile
from kernels.shared_memory import shared_nbytes

LOG2_E = 1.4426950408889634
LOG2_E_OF_SINKS = tl.constexpr(LOG2_E)
MERGE_COLUMNS = tl.constexpr(64)
"""Of D, for each program that merges."""


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    plan: tuple[Tile, int] | None = None,
) -> torch.Tensor:
    """`plan` is the tile and the splits (a power of two), those of `cost` unless given."""
    rows, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    out = torch.empty(rows, heads * head_dim, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if plan is None:
        _launch_variants(q.device, q.dtype, heads, tuple(k_pages.shape[1:]), window, sinks is not None)
    seen = min(start + rows, window or start + rows)
    tile, splits = plan or cost.prefill_plan(
        rows, heads, kv_heads, head_dim, seen, q.element_size(), shared_nbytes(q.device)
    )
    tiles = triton.cdiv(rows * (heads // kv_heads), tile.block_m)
    if window is not None:  # of a tile of rows, whose first position begins a block
        seen = min(start + rows, window + triton.cdiv(tile.block_m, heads // kv_heads) + tile.block_n)
    share = triton.cdiv(triton.cdiv(seen, tile.block_n), splits) * tile.block_n
    sums, stats = _partials(q, splits) if splits > 1 else (out, out)
    q = q if q.stride(2) == 1 else q.contiguous()
    largest = max(k_pages.numel(), rows * q.stride(0), out.numel() * splits)
    arguments = launch_arguments(heads, k_pages, tile, largest >= 2**31, window)
    _prefill[(tiles, kv_heads, splits)](
        q,
        k_pages,
        v_pages,
        pages.contiguous(),
        out,
        sums,
        stats,
        out if sinks is None else sinks,
        rows,
        start,
        splits,
        share,
        q.stride(0),
        q.stride(1),
        scale * LOG2_E,
        SPLIT=splits > 1,
        SINKS=sinks is not None,
        **arguments,
    )
    if splits > 1:
        grid = merge_grid(rows, heads, head_dim)
        options = merge_arguments(heads, k_pages, cost.PROGRAMS, tile, False, window, sinks is not None)
        _merge[grid](sums, stats, out, out, out if sinks is None else sinks, start, splits, share, **options)
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
    plan: tuple[Tile, int] | None = None,
) -> torch.Tensor:
    """`plan` is the tile and the splits (a power of two), those of `cost` unless given."""
    rows, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    out = torch.empty(rows, heads * head_dim, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    tile, splits = plan or cost.decode_plan(heads, kv_heads, head_dim, q.element_size(), shared_nbytes(q.device))
    sums, stats = _partials(q, splits)
    q = q if q.stride(2) == 1 else q.contiguous()
    table, lengths = table if table.stride(1) == 1 else table.contiguous(), lengths.contiguous()
    arguments = launch_arguments(heads, k_pages, tile, k_pages.numel() >= 2**31, window)
    _decode[(splits, kv_heads, rows)](
        q,
        k_pages,
        v_pages,
        table,
        lengths,
        sums,
        stats,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        scale * LOG2_E,
        SPLITS=splits,
        **arguments,
    )
    grid = merge_grid(rows, heads, head_dim)
    options = merge_arguments(heads, k_pages, splits, tile, True, window, sinks is not None)
    _merge[grid](sums, stats, out, lengths, out if sinks is None else sinks, 0, splits, 0, **options)
    return out


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    if k.numel() == 0:
        return
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    arguments = store_arguments(k.shape[1], k.shape[2], k_pages.shape[1])
    grid = (k.shape[0], triton.cdiv(k.shape[1] * k.shape[2], arguments["BLOCK"]))
    _store_kv[grid](
        k,
        v,
        k_pages,
        v_pages,
        pages.contiguous(),
        offsets.contiguous(),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        **arguments,
    )


@functools.cache
def _launch_variants(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    page: tuple[int, int, int],
    window: int | None,
    with_sinks: bool,
) -> None:
    """Both kernels that chunks over such pages [page_tokens, kv_heads, D] may need, before the first chunk.

    A first launch loads code, for which the driver may wait until the GPU has done all else: it must not come later, in
    a step that waits for copies.
    """
    q = torch.zeros(1, heads, page[2], dtype=dtype, device=device)
    pages = torch.zeros(1, *page, dtype=dtype, device=device)
    table = torch.zeros(1, dtype=torch.int64, device=device)
    sinks = torch.zeros(heads, dtype=torch.float32, device=device) if with_sinks else None
    whole, split = cost.prefill_tiles(page[2], q.element_size(), shared_nbytes(device))
    for plan in ((whole, 1), (split, 2)):
        attention(q, pages, pages, table, 0, 1.0, window, sinks, plan)


def launch_arguments(
    heads: int, k_pages: torch.Tensor, tile: Tile, wide: bool, window: int | None = None
) -> dict[str, Any]:
    """`wide`: offsets into pages, q or results may not fit 32 bits."""
    _, page_tokens, kv_heads, head_dim = k_pages.shape
    block_d = max(16, triton.next_power_of_2(head_dim))
    return {
        "GROUP": heads // kv_heads,
        "KV_HEADS": kv_heads,
        "D": head_dim,
        "PAGE_TOKENS": page_tokens,
        "WIDE": wide,
        "WINDOW": window or 0,
        "BLOCK_D": block_d,
        "CHUNK": min(block_d, tile.chunk),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def merge_grid(rows: int, heads: int, head_dim: int) -> tuple[int, int]:
    return rows * heads, triton.cdiv(head_dim, MERGE_COLUMNS.value)


def merge_arguments(
    heads: int,
    k_pages: torch.Tensor,
    most_splits: int,
    tile: Tile,
    decode: bool,
    window: int | None = None,
    sinks: bool = False,
) -> dict[str, Any]:
    kv_heads, head_dim = k_pages.shape[2:]
    return {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "D": head_dim,
        "WINDOW": window or 0,
        "SINKS": sinks,
        "BLOCK_S": most_splits,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "DECODE": decode,
        "num_warps": 4,
    }


def store_arguments(kv_heads: int, head_dim: int, page_tokens: int) -> dict[str, Any]:
    return {
        "KV_HEADS": kv_heads,
        "D": head_dim,
        "PAGE_TOKENS": page_tokens,
        "BLOCK": min(1024, triton.next_power_of_2(kv_heads * head_dim)),
        "num_warps": 4,
    }


def _partials(q: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row, head and split: the sum of values, and the largest score with the sum of weights under it."""
    rows, heads, head_dim = q.shape
    sums = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=q.device)
    return sums, torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)


@triton.jit
def _step(
    acc,
    total,
    highest,
    begin,
    end,
    q,
    q_rows,
    live,
    last,
    table_ptr,
    k_ptr,
    v_ptr,
    scale,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TOKEN: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Takes in the positions begin .. begin + BLOCK_N - 1 that are before `end`, for each row those up to `last`."""
    position = begin + tl.arange(0, BLOCK_N)
    there = position < end
    page = tl.load(table_ptr + position // PAGE_TOKENS, mask=there, other=0).to(tl.int64 if WIDE else tl.int32)
    place = (page * PAGE_TOKENS + position % PAGE_TOKENS) * TOKEN
    d = tl.arange(0, BLOCK_D)
    if CHUNK == BLOCK_D:
        k = tl.load(k_ptr + place[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        scores = tl.zeros((live.shape[0], BLOCK_N), tl.float32)
        for first in tl.static_range(0, D, CHUNK):
            c = first + tl.arange(0, CHUNK)
            q = tl.load(q_rows + c[None, :], mask=live[:, None] & (c < D)[None, :], other=0)
            k = tl.load(k_ptr + place[:, None] + c[None, :], mask=there[:, None] & (c < D)[None, :], other=0)
            scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    visible = there[None, :] & (position[None, :] <= last[:, None])
    if WINDOW > 0:
        visible = visible & (position[None, :] > last[:, None] - WINDOW)
    scores = tl.where(visible, scores * scale, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    # What lies in the pages past the end need not be numbers, and 0 times NaN is not 0.
    v = tl.load(v_ptr + place[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total * shrink + tl.sum(weights, axis=1), higher


@triton.jit
def _attend(
    q_rows,  # [BLOCK_M, 1] pointers
    live,  # [BLOCK_M]: there is such a row
    last,  # [BLOCK_M]: the last position that it sees
    begin,
    end,
    table_ptr,
    k_ptr,  # of the kv head
    v_ptr,
    scale,  # of the scores, times log2 of e
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TOKEN: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sums over positions begin .. end - 1: of weighted values, and of weights; and the highest score."""
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((live.shape[0], BLOCK_D), tl.float32)
    total = tl.zeros((live.shape[0],), tl.float32)
    highest = tl.full((live.shape[0],), float("-inf"), tl.float32)
    q = tl.zeros((live.shape[0], CHUNK), q_rows.dtype.element_ty)
    if CHUNK == BLOCK_D:
        q = tl.load(q_rows + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0)
    if STAGES > 0:
        for tile in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            acc, total, highest = _step(
                acc,
                total,
                highest,
                tile,
                end,
                q,
                q_rows,
                live,
                last,
                table_ptr,
                k_ptr,
                v_ptr,
                scale,
                D,
                PAGE_TOKENS,
                TOKEN,
                WIDE,
                WINDOW,
                BLOCK_D,
                CHUNK,
                BLOCK_N,
            )
    else:
        tile = begin
        while tile < end:
            acc, total, highest = _step(
                acc,
                total,
                highest,
                tile,
                end,
                q,
                q_rows,
                live,
                last,
                table_ptr,
                k_ptr,
                v_ptr,
                scale,
                D,
                PAGE_TOKENS,
                TOKEN,
                WIDE,
                WINDOW,
                BLOCK_D,
                CHUNK,
                BLOCK_N,
            )
            tile += BLOCK_N
    return acc, total, highest


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the block of positions begins that holds the first one which `position` sees: 0 without a window."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _store_partial(sums_ptr, stats_ptr, index, live, acc, total, highest, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.store(sums_ptr + index[:, None] * D + d[None, :], acc, mask=live[:, None] & (d < D)[None, :])
    tl.store(stats_ptr + index * 2, highest, mask=live)
    tl.store(stats_ptr + index * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=["rows", "start", "splits", "share"])
def _prefill(
    q_ptr,  # [n, KV_HEADS * GROUP, D]
    k_ptr,  # [num_pages, PAGE_TOKENS, KV_HEADS, D]
    v_ptr,
    table_ptr,  # [P] int64
    out_ptr,  # [n, KV_HEADS * GROUP * D], written if there is one split
    sums_ptr,  # [n, KV_HEADS * GROUP, splits, D] float32, written if there are several
    stats_ptr,  # [n, KV_HEADS * GROUP, splits, 2] float32
    sinks_ptr,  # [KV_HEADS * GROUP] float32
    rows,
    start,
    splits,
    share,  # positions of a split
    q_stride,
    q_head_stride,
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
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last ones have most to do
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pair // GROUP
    if WIDE:
        row = row.to(tl.int64)
    live = row < rows
    head = kv_head * GROUP + pair % GROUP
    begin = _first_seen(start + tile * BLOCK_M // GROUP, WINDOW, BLOCK_N) + split * share
    end = start + tl.minimum(rows, (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    if SPLIT:
        end = tl.minimum(end, begin + share)
        if begin >= end:
            return
    q_rows = q_ptr + (row * q_stride + head * q_head_stride)[:, None]
    acc, total, highest = _attend(
        q_rows,
        live,
        start + row,
        begin,
        end,
        table_ptr,
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
    index = row * (KV_HEADS * GROUP) + head
    if SPLIT:
        _store_partial(sums_ptr, stats_ptr, index * splits + split, live, acc, total, highest, D, BLOCK_D)
    else:
        if SINKS:
            sink = tl.load(sinks_ptr + head) * LOG2_E_OF_SINKS
            higher = tl.maximum(highest, sink)
            acc = acc * tl.exp2(highest - higher)[:, None]
            total = total * tl.exp2(highest - higher) + tl.exp2(sink - higher)
        d = tl.arange(0, BLOCK_D)
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + index[:, None] * D + d[None, :], out, mask=live[:, None] & (d < D)[None, :])


@triton.jit
def _decode_share(positions, splits, BLOCK_N: tl.constexpr):
    """Positions of a split: whole tiles, from those that the sequence sees alone."""
    return tl.cdiv(tl.cdiv(positions, BLOCK_N), splits) * BLOCK_N


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    q_ptr,  # [B, KV_HEADS * GROUP, D]
    k_ptr,  # [num_pages, PAGE_TOKENS, KV_HEADS, D]
    v_ptr,
    table_ptr,  # [B, P] int32
    lengths_ptr,  # [B] int32
    sums_ptr,  # [B, KV_HEADS * GROUP, SPLITS, D] float32
    stats_ptr,  # [B, KV_HEADS * GROUP, SPLITS, 2] float32
    q_stride,
    q_head_stride,
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
    SPLITS: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    first = _first_seen(length - 1, WINDOW, BLOCK_N)
    share = _decode_share(length - first, SPLITS, BLOCK_N)
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    if begin >= end:
        return
    member = tl.arange(0, BLOCK_M)
    live = member < GROUP
    head = kv_head * GROUP + member
    q_rows = q_ptr + row * q_stride + (head * q_head_stride)[:, None]
    acc, total, highest = _attend(
        q_rows,
        live,
        tl.where(live, length - 1, -1),
        begin,
        end,
        table_ptr + row * table_stride,
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
    index = (row * (KV_HEADS * GROUP) + head) * SPLITS + split
    _store_partial(sums_ptr, stats_ptr, index, live, acc, total, highest, D, BLOCK_D)


@triton.jit(do_not_specialize=["start", "splits", "share"])
def _merge(
    sums_ptr,  # [n, HEADS, splits, D] float32
    stats_ptr,  # [n, HEADS, splits, 2] float32
    out_ptr,  # [n, HEADS * D]
    lengths_ptr,  # [n] int32, of a decode step
    sinks_ptr,  # [HEADS] float32
    start,  # of a chunk
    splits,
    share,  # of a chunk
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = index // HEADS
    if DECODE:
        end = tl.load(lengths_ptr + row)
        first = _first_seen(end - 1, WINDOW, BLOCK_N)
        share = _decode_share(end - first, splits, BLOCK_N)
    else:
        end = start + row + 1
        tile = (row * GROUP + index % HEADS % GROUP) // BLOCK_M  # that had this row and head
        first = _first_seen(start + tile * BLOCK_M // GROUP, WINDOW, BLOCK_N)
    split = tl.arange(0, BLOCK_S)
    written = (split < splits) & (first + split * share < end)
    if WINDOW > 0:  # a split may have been of other rows of the tile alone
        written = written & (first + (split + 1) * share > end - WINDOW)
    stats = stats_ptr + (index * splits + split) * 2
    highest = tl.load(stats, mask=written, other=float("-inf"))
    total = tl.load(stats + 1, mask=written, other=0)
    base = tl.where(end > 0, tl.max(highest, axis=0), 0.0)
    if SINKS:
        sink = tl.load(sinks_ptr + index % HEADS) * LOG2_E_OF_SINKS
        base = tl.maximum(base, sink)
    weights = tl.where(written, tl.exp2(highest - base), 0.0)
    d = tl.program_id(1) * MERGE_COLUMNS + tl.arange(0, MERGE_COLUMNS)
    mask = written[:, None] & (d < D)[None, :]
    sums = tl.load(sums_ptr + (index * splits + split)[:, None] * D + d[None, :], mask=mask, other=0)
    whole = tl.sum(total * weights, axis=0)
    if SINKS:
        whole += tl.exp2(sink - base)
    out = tl.sum(sums * weights[:, None], axis=0) / tl.where(end > 0, whole, 1.0)
    tl.store(out_ptr + index * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _store_kv(
    k_ptr,  # [T, KV_HEADS, D]
    v_ptr,
    k_pages_ptr,  # [num_pages, PAGE_TOKENS, KV_HEADS, D]
    v_pages_ptr,
    pages_ptr,  # [T] int64
    offsets_ptr,  # [T] int64
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < KV_HEADS * D
    place = tl.load(pages_ptr + row) * PAGE_TOKENS + tl.load(offsets_ptr + row)
    to = place * (KV_HEADS * D) + i
    k = tl.load(k_ptr + row * k_stride + (i // D) * k_head_stride + i % D, mask=mask)
    v = tl.load(v_ptr + row * v_stride + (i // D) * v_head_stride + i % D, mask=mask)
    tl.store(k_pages_ptr + to, k, mask=mask)
    tl.store(v_pages_ptr + to, v, mask=mask)
