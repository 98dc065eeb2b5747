# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: flash attention over latents that it finds by page table, for prefill chunks and for decode steps.

All heads share the latents. A program takes neighbouring (token, head) pairs as rows: of a chunk across its tokens, of
a decode step those of one sequence. The context may be split among programs, whose sums a second kernel merges.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.latent_attention import cost
from kernels.latent_attention.cost import Tile
from kernels.shared_memory import shared_nbytes

LOG2_E = 1.4426950408889634
MERGE_COLUMNS = tl.constexpr(128)
"""Of R, for each program that merges."""


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    scale: float,
    plan: tuple[Tile, int] | None = None,
) -> torch.Tensor:
    """`plan` is the tile and the splits (a power of two), those of `cost` unless given."""
    rows, heads, rank = q.shape
    out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if plan is None:
        _launch_variants(q.device, q.dtype, heads, rank, q_rope.shape[2], latent_pages.shape[1])
        tile = cost.tile(heads, q.element_size(), shared_nbytes(q.device))
        plan = tile, cost.prefill_splits(rows, heads, start + rows, tile)
    tile, splits = plan
    share = triton.cdiv(triton.cdiv(start + rows, tile.block_n), splits) * tile.block_n
    sums, stats = _partials(q, splits) if splits > 1 else (out, out)
    q, q_rope = _steadily_strided(q), _steadily_strided(q_rope)
    largest = max(latent_pages.numel(), rows * max(q.stride(0), q_rope.stride(0)), out.numel() * splits)
    arguments = launch_arguments(heads, latent_pages, rope_pages, tile, wide=largest >= 2**31)
    _prefill[prefill_grid(rows, heads, arguments, splits)](
        q,
        q_rope,
        latent_pages,
        rope_pages,
        pages.contiguous(),
        out,
        sums,
        stats,
        rows,
        start,
        splits,
        share,
        q.stride(0),
        q.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        scale * LOG2_E,
        SPLIT=splits > 1,
        **arguments,
    )
    if splits > 1:
        options = merge_arguments(heads, rank, cost.PROGRAMS, tile, decode=False)
        _merge[merge_grid(rows, heads, rank)](sums, stats, out, out, start, splits, share, **options)
    return out


def decode_latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    plan: tuple[Tile, int] | None = None,
) -> torch.Tensor:
    """`plan` is the tile and the splits (a power of two), those of `cost` unless given."""
    rows, heads, rank = q.shape
    out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if plan is None:
        tile = cost.tile(heads, q.element_size(), shared_nbytes(q.device))
        plan = tile, cost.decode_splits(heads, tile)
    tile, splits = plan
    sums, stats = _partials(q, splits)
    q, q_rope = _steadily_strided(q), _steadily_strided(q_rope)
    table, lengths = table if table.stride(1) == 1 else table.contiguous(), lengths.contiguous()
    arguments = launch_arguments(heads, latent_pages, rope_pages, tile, wide=latent_pages.numel() >= 2**31)
    _decode[decode_grid(rows, heads, arguments, splits)](
        q,
        q_rope,
        latent_pages,
        rope_pages,
        table,
        lengths,
        sums,
        stats,
        q.stride(0),
        q.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        table.stride(0),
        scale * LOG2_E,
        SPLITS=splits,
        **arguments,
    )
    options = merge_arguments(heads, rank, splits, tile, decode=True)
    _merge[merge_grid(rows, heads, rank)](sums, stats, out, lengths, 0, splits, 0, **options)
    return out


def store_latent(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    if latent.numel() == 0:
        return
    latent, rope_key = (x if x.stride(2) == 1 else x.contiguous() for x in (latent, rope_key))
    arguments = store_arguments(latent.shape[2], rope_key.shape[2], latent_pages.shape[1])
    places = (pages.contiguous(), offsets.contiguous())
    strides = (latent.stride(0), rope_key.stride(0))
    _store_latent[(latent.shape[0],)](latent, rope_key, latent_pages, rope_pages, *places, *strides, **arguments)


@functools.cache
def _launch_variants(
    device: torch.device, dtype: torch.dtype, heads: int, rank: int, rope: int, page_tokens: int
) -> None:
    """Both kernels that chunks over such pages may need, before the first chunk: see kernels.attention.tri."""
    q = torch.zeros(1, heads, rank, dtype=dtype, device=device)
    q_rope = torch.zeros(1, heads, rope, dtype=dtype, device=device)
    latents, ropes = (torch.zeros(1, page_tokens, 1, width, dtype=dtype, device=device) for width in (rank, rope))
    table = torch.zeros(1, dtype=torch.int64, device=device)
    tile = cost.tile(heads, q.element_size(), shared_nbytes(device))
    for splits in (1, 2):
        latent_attention(q, q_rope, latents, ropes, table, 0, 1.0, (tile, splits))


def launch_arguments(
    heads: int, latent_pages: torch.Tensor, rope_pages: torch.Tensor, tile: Tile, wide: bool
) -> dict[str, Any]:
    """`wide`: offsets into pages, q or results may not fit 32 bits."""
    _, page_tokens, _, rank = latent_pages.shape
    block_r = max(16, triton.next_power_of_2(rank))
    return {
        "HEADS": heads,
        "R": rank,
        "P": rope_pages.shape[3],
        "PAGE_TOKENS": page_tokens,
        "WIDE": wide,
        "BLOCK_R": block_r,
        "BLOCK_P": max(16, triton.next_power_of_2(rope_pages.shape[3])),
        "CHUNK": min(block_r, tile.chunk),
        "BLOCK_V": min(block_r, tile.block_v),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }


def prefill_grid(rows: int, heads: int, arguments: dict[str, Any], splits: int) -> tuple[int, int, int]:
    return triton.cdiv(rows * heads, arguments["BLOCK_M"]), arguments["BLOCK_R"] // arguments["BLOCK_V"], splits


def decode_grid(rows: int, heads: int, arguments: dict[str, Any], splits: int) -> tuple[int, int, int]:
    tiles = triton.cdiv(heads, arguments["BLOCK_M"]) * (arguments["BLOCK_R"] // arguments["BLOCK_V"])
    return splits, tiles, rows


def merge_grid(rows: int, heads: int, rank: int) -> tuple[int, int]:
    return rows * heads, triton.cdiv(rank, MERGE_COLUMNS.value)


def merge_arguments(heads: int, rank: int, most_splits: int, tile: Tile, decode: bool) -> dict[str, Any]:
    return {
        "HEADS": heads,
        "R": rank,
        "BLOCK_S": most_splits,
        "BLOCK_N": tile.block_n,
        "DECODE": decode,
        "num_warps": 4,
    }


def store_arguments(rank: int, rope: int, page_tokens: int) -> dict[str, Any]:
    blocks = {"BLOCK_R": triton.next_power_of_2(rank), "BLOCK_P": triton.next_power_of_2(rope)}
    return {"R": rank, "P": rope, "PAGE_TOKENS": page_tokens, **blocks, "num_warps": 4}


def _steadily_strided(x: torch.Tensor) -> torch.Tensor:
    """`x` [n, heads, W], or a copy if a step of another n would have strides that Triton compiles for anew: those of
    widths that are no multiple of 16, where n is a factor of one. No kernel may be new in a step that waits for copies.
    """
    return x if x.stride(2) == 1 and x.shape[2] % 16 == 0 else x.contiguous()


def _partials(q: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row, head and split: the sum of latents, and the largest score with the sum of weights under it."""
    rows, heads, rank = q.shape
    sums = torch.empty(rows, heads, splits, rank, dtype=torch.float32, device=q.device)
    return sums, torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=q.device)


@triton.jit
def _step(
    acc,
    total,
    highest,
    begin,
    end,
    q,
    q_rope,
    q_rows,
    live,
    last,
    part,
    table_ptr,
    latent_ptr,
    rope_ptr,
    scale,
    R: tl.constexpr,
    P: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Takes in the positions begin .. begin + BLOCK_N - 1 that are before `end`, for each row those up to `last`."""
    position = begin + tl.arange(0, BLOCK_N)
    there = position < end
    page = tl.load(table_ptr + position // PAGE_TOKENS, mask=there, other=0).to(tl.int64 if WIDE else tl.int32)
    place = page * PAGE_TOKENS + position % PAGE_TOKENS
    p = tl.arange(0, BLOCK_P)
    rope = tl.load(rope_ptr + place[:, None] * P + p[None, :], mask=there[:, None] & (p < P)[None, :], other=0)
    scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
    # What lies in the pages past the end need not be numbers, and 0 times NaN is not 0: so it is not loaded.
    if CHUNK == BLOCK_R:
        r = tl.arange(0, BLOCK_R)
        latent = tl.load(latent_ptr + place[:, None] * R + r[None, :], mask=there[:, None] & (r < R)[None, :], other=0)
        scores = tl.dot(q, tl.trans(latent), scores, input_precision="ieee")
    else:
        for first in tl.static_range(0, R, CHUNK):
            c = first + tl.arange(0, CHUNK)
            q = tl.load(q_rows + c[None, :], mask=live[:, None] & (c < R)[None, :], other=0)
            k = tl.load(latent_ptr + place[:, None] * R + c[None, :], mask=there[:, None] & (c < R)[None, :], other=0)
            scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        v = part * BLOCK_V + tl.arange(0, BLOCK_V)
        latent = tl.load(latent_ptr + place[:, None] * R + v[None, :], mask=there[:, None] & (v < R)[None, :], other=0)
    visible = there[None, :] & (position[None, :] <= last[:, None])
    scores = tl.where(visible, scores * scale, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
    return acc, total * shrink + tl.sum(weights, axis=1), higher


@triton.jit
def _attend(
    q_rows,  # [BLOCK_M, 1] pointers
    q_rope_rows,  # [BLOCK_M, 1] pointers
    live,  # [BLOCK_M]: there is such a row
    last,  # [BLOCK_M]: the last position that it sees
    part,  # which BLOCK_V of R are summed up
    begin,
    end,
    table_ptr,
    latent_ptr,
    rope_ptr,
    scale,  # of the scores, times log2 of e
    R: tl.constexpr,
    P: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sums over positions begin .. end - 1: of weighted latents, and of weights; and the highest score."""
    p = tl.arange(0, BLOCK_P)
    acc = tl.zeros((live.shape[0], BLOCK_V), tl.float32)
    total = tl.zeros((live.shape[0],), tl.float32)
    highest = tl.full((live.shape[0],), float("-inf"), tl.float32)
    q_rope = tl.load(q_rope_rows + p[None, :], mask=live[:, None] & (p < P)[None, :], other=0)
    q = tl.zeros((live.shape[0], CHUNK), q_rows.dtype.element_ty)
    if CHUNK == BLOCK_R:
        r = tl.arange(0, BLOCK_R)
        q = tl.load(q_rows + r[None, :], mask=live[:, None] & (r < R)[None, :], other=0)
    if STAGES > 0:
        for tile in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            acc, total, highest = _step(
                acc,
                total,
                highest,
                tile,
                end,
                q,
                q_rope,
                q_rows,
                live,
                last,
                part,
                table_ptr,
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
                q_rope,
                q_rows,
                live,
                last,
                part,
                table_ptr,
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
            )
            tile += BLOCK_N
    return acc, total, highest


@triton.jit
def _store_partial(sums_ptr, stats_ptr, index, live, part, acc, total, highest, R: tl.constexpr, BLOCK_V: tl.constexpr):
    v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    tl.store(sums_ptr + index[:, None] * R + v[None, :], acc, mask=live[:, None] & (v < R)[None, :])
    if part == 0:
        tl.store(stats_ptr + index * 2, highest, mask=live)
        tl.store(stats_ptr + index * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=["rows", "start", "splits", "share"])
def _prefill(
    q_ptr,  # [n, HEADS, R]
    q_rope_ptr,  # [n, HEADS, P]
    latent_ptr,  # [num_pages, PAGE_TOKENS, 1, R]
    rope_ptr,  # [num_pages, PAGE_TOKENS, 1, P]
    table_ptr,  # [X] int64
    out_ptr,  # [n, HEADS, R], written if there is one split
    sums_ptr,  # [n, HEADS, splits, R] float32, written if there are several
    stats_ptr,  # [n, HEADS, splits, 2] float32
    rows,
    start,
    splits,
    share,  # positions of a split
    q_stride,
    q_head_stride,
    q_rope_stride,
    q_rope_head_stride,
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
    SPLIT: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last ones have most to do
    part = tl.program_id(1)
    split = tl.program_id(2)
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pair // HEADS
    if WIDE:
        row = row.to(tl.int64)
    live = row < rows
    head = pair % HEADS
    begin = split * share
    end = start + tl.minimum(rows, (tile * BLOCK_M + BLOCK_M - 1) // HEADS + 1)
    if SPLIT:
        end = tl.minimum(end, begin + share)
        if begin >= end:
            return
    acc, total, highest = _attend(
        q_ptr + (row * q_stride + head * q_head_stride)[:, None],
        q_rope_ptr + (row * q_rope_stride + head * q_rope_head_stride)[:, None],
        live,
        start + row,
        part,
        begin,
        end,
        table_ptr,
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
    index = row * HEADS + head
    if SPLIT:
        _store_partial(sums_ptr, stats_ptr, index * splits + split, live, part, acc, total, highest, R, BLOCK_V)
    else:
        v = part * BLOCK_V + tl.arange(0, BLOCK_V)
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + index[:, None] * R + v[None, :], out, mask=live[:, None] & (v < R)[None, :])


@triton.jit
def _decode_share(length, splits, BLOCK_N: tl.constexpr):
    """Positions of a split: whole tiles, from the sequence's own length alone."""
    return tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    q_ptr,  # [B, HEADS, R]
    q_rope_ptr,  # [B, HEADS, P]
    latent_ptr,  # [num_pages, PAGE_TOKENS, 1, R]
    rope_ptr,  # [num_pages, PAGE_TOKENS, 1, P]
    table_ptr,  # [B, X] int32
    lengths_ptr,  # [B] int32
    sums_ptr,  # [B, HEADS, SPLITS, R] float32
    stats_ptr,  # [B, HEADS, SPLITS, 2] float32
    q_stride,
    q_head_stride,
    q_rope_stride,
    q_rope_head_stride,
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
    SPLITS: tl.constexpr,
):
    PARTS: tl.constexpr = BLOCK_R // BLOCK_V
    split = tl.program_id(0)
    part = tl.program_id(1) % PARTS
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    share = _decode_share(length, SPLITS, BLOCK_N)
    begin = split * share
    end = tl.minimum(begin + share, length)
    if begin >= end:
        return
    head = tl.program_id(1) // PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    live = head < HEADS
    acc, total, highest = _attend(
        q_ptr + row * q_stride + (head * q_head_stride)[:, None],
        q_rope_ptr + row * q_rope_stride + (head * q_rope_head_stride)[:, None],
        live,
        tl.where(live, length - 1, -1),
        part,
        begin,
        end,
        table_ptr + row * table_stride,
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
    index = (row * HEADS + head) * SPLITS + split
    _store_partial(sums_ptr, stats_ptr, index, live, part, acc, total, highest, R, BLOCK_V)


@triton.jit(do_not_specialize=["start", "splits", "share"])
def _merge(
    sums_ptr,  # [n, HEADS, splits, R] float32
    stats_ptr,  # [n, HEADS, splits, 2] float32
    out_ptr,  # [n, HEADS, R]
    lengths_ptr,  # [n] int32, of a decode step
    start,  # of a chunk
    splits,
    share,  # of a chunk
    HEADS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = index // HEADS
    if DECODE:
        visible = tl.load(lengths_ptr + row)
        share = _decode_share(visible, splits, BLOCK_N)
    else:
        visible = start + row + 1
    split = tl.arange(0, BLOCK_S)
    written = (split < splits) & (split * share < visible)
    stats = stats_ptr + (index * splits + split) * 2
    highest = tl.load(stats, mask=written, other=float("-inf"))
    total = tl.load(stats + 1, mask=written, other=0)
    base = tl.where(visible > 0, tl.max(highest, axis=0), 0.0)
    weights = tl.where(written, tl.exp2(highest - base), 0.0)
    r = tl.program_id(1) * MERGE_COLUMNS + tl.arange(0, MERGE_COLUMNS)
    mask = written[:, None] & (r < R)[None, :]
    sums = tl.load(sums_ptr + (index * splits + split)[:, None] * R + r[None, :], mask=mask, other=0)
    whole = tl.where(visible > 0, tl.sum(total * weights, axis=0), 1.0)
    out = tl.sum(sums * weights[:, None], axis=0) / whole
    tl.store(out_ptr + index * R + r, out.to(out_ptr.dtype.element_ty), mask=r < R)


@triton.jit
def _store_latent(
    latent_ptr,  # [T, 1, R]
    rope_key_ptr,  # [T, 1, P]
    latent_pages_ptr,  # [num_pages, PAGE_TOKENS, 1, R]
    rope_pages_ptr,  # [num_pages, PAGE_TOKENS, 1, P]
    pages_ptr,  # [T] int64
    offsets_ptr,  # [T] int64
    latent_stride,
    rope_stride,
    R: tl.constexpr,
    P: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(pages_ptr + row) * PAGE_TOKENS + tl.load(offsets_ptr + row)
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    latent = tl.load(latent_ptr + row * latent_stride + r, mask=r < R)
    rope = tl.load(rope_key_ptr + row * rope_stride + p, mask=p < P)
    tl.store(latent_pages_ptr + place * R + r, latent, mask=r < R)
    tl.store(rope_pages_ptr + place * P + p, rope, mask=p < P)
