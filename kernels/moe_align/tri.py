# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: a stable counting sort by expert, and the table of row blocks.

The routes are cut into chunks; a chunk is sorted by one program on keys expert * CHUNK + place, which makes the order
stable, and knows from the counts of all chunks where each expert's routes go. One chunk needs one launch, the table
included. Of few routes each is compared with each: no sort, histogram or prefix sum, which take one program longer.
"""

import torch
import triton
import triton.language as tl

CHUNK = 1024
"""Routes a program sorts."""

FEW = 64
"""Routes at most that are compared with each other."""

EXPERTS_PER_PROGRAM = tl.constexpr(128)
"""Of the block table."""


def moe_align(experts: torch.Tensor, num_experts: int, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    count, device = experts.numel(), experts.device
    routes = torch.empty(count, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    flat = experts.reshape(-1)
    bins = triton.next_power_of_2(num_experts + 1)
    chunks = triton.cdiv(count, chunk)
    if chunks <= 1:
        _sort_one_chunk[(1,)](flat, routes, offsets, count, num_experts, BINS=bins, CHUNK=chunk, num_warps=8)
        return routes, offsets
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    _count_chunk[(chunks,)](flat, counts, count, num_experts, BINS=bins, CHUNK=chunk, num_warps=4)
    _place_chunks[(1,)](counts, offsets, chunks, num_experts, BINS=bins, num_warps=8)
    _sort_chunk[(chunks,)](flat, counts, routes, count, num_experts, BINS=bins, CHUNK=chunk, num_warps=8)
    return routes, offsets


def align_in_blocks(
    experts: torch.Tensor, num_experts: int, block_rows: int, bound: int, few: int = FEW, chunk: int = CHUNK
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """routes and offsets; starts, expert, first and rows."""
    count, device = experts.numel(), experts.device
    if count > chunk:
        routes, offsets = moe_align(experts, num_experts, chunk)
        return (routes, offsets), blocks(offsets, block_rows, bound)
    routes = torch.empty(count, dtype=torch.int32, device=device)
    offsets, starts = (torch.empty(num_experts + 1, dtype=torch.int32, device=device) for _ in range(2))
    expert, first, rows = (torch.empty(bound, dtype=torch.int32, device=device) for _ in range(3))
    tensors = (experts.reshape(-1), routes, offsets, starts, expert, first, rows)
    size = max(16, triton.next_power_of_2(count))
    if count <= few:
        bins = triton.next_power_of_2(num_experts)
        _align_few[(1,)](*tensors, count, num_experts, BLOCK_M=block_rows, BINS=bins, SIZE=size, num_warps=8)
    else:
        bins = triton.next_power_of_2(num_experts + 1)
        _align_one_chunk[(1,)](*tensors, count, num_experts, BLOCK_M=block_rows, BINS=bins, CHUNK=size, num_warps=8)
    return (routes, offsets), (starts, expert, first, rows)


def blocks(
    offsets: torch.Tensor, block_rows: int, bound: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_experts, device = offsets.shape[0] - 1, offsets.device
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    expert, first, rows = (torch.empty(bound, dtype=torch.int32, device=device) for _ in range(3))
    _block_table[(triton.cdiv(num_experts, EXPERTS_PER_PROGRAM.value),)](
        offsets,
        starts,
        expert,
        first,
        rows,
        num_experts,
        BLOCK_M=block_rows,
        BINS=triton.next_power_of_2(num_experts + 1),
        num_warps=4,
    )
    return starts, expert, first, rows


@triton.jit
def _keys(experts_ptr, chunk, count, num_experts, CHUNK: tl.constexpr):
    """expert * CHUNK + place; places past the end belong to expert `num_experts`, behind all others."""
    place = tl.arange(0, CHUNK)
    route = chunk * CHUNK + place
    expert = tl.load(experts_ptr + route, mask=route < count, other=num_experts)
    return expert * CHUNK + place


@triton.jit(do_not_specialize=["count"])
def _sort_one_chunk(experts_ptr, routes_ptr, offsets_ptr, count, num_experts, BINS: tl.constexpr, CHUNK: tl.constexpr):
    keys = _keys(experts_ptr, 0, count, num_experts, CHUNK)
    counts = tl.histogram(keys // CHUNK, BINS)
    bins = tl.arange(0, BINS)
    tl.store(offsets_ptr + bins, tl.cumsum(counts, 0) - counts, mask=bins <= num_experts)
    place = tl.arange(0, CHUNK)
    tl.store(routes_ptr + place, tl.sort(keys) % CHUNK, mask=place < count)


@triton.jit(do_not_specialize=["count"])
def _align_few(
    experts_ptr,
    routes_ptr,
    offsets_ptr,
    starts_ptr,
    expert_ptr,
    first_ptr,
    rows_ptr,
    count,
    num_experts,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    SIZE: tl.constexpr,
):
    route = tl.arange(0, SIZE)
    there = route < count
    expert = tl.load(experts_ptr + route, mask=there, other=num_experts)
    key = expert * SIZE + route
    before = (key[:, None] < key[None, :]).to(tl.int32)  # sums over the first axis need no other thread
    same = (expert[:, None] == expert[None, :]).to(tl.int32)
    counts = tl.sum(before + ((before & same) << 10) + (same << 20), 0)
    place = counts & 0x3FF
    rank = (counts >> 10) & 0x3FF  # among its expert's routes
    opens = there & (rank % BLOCK_M == 0)
    block = tl.sum(before & opens.to(tl.int32)[:, None], 0)
    tl.store(routes_ptr + place, route, mask=there)
    tl.store(expert_ptr + block, expert, mask=opens)
    tl.store(first_ptr + block, place, mask=opens)
    tl.store(rows_ptr + block, tl.minimum((counts >> 20) - rank, BLOCK_M), mask=opens)

    weight = 1 + (opens.to(tl.int32) << 16)
    bins = tl.arange(0, BINS)
    lower = tl.sum(tl.where(expert[:, None] < bins[None, :], weight[:, None], 0), 0)
    tl.store(offsets_ptr + bins, lower & 0xFFFF, mask=bins < num_experts)
    tl.store(starts_ptr + bins, lower >> 16, mask=bins < num_experts)
    tl.store(offsets_ptr + num_experts, count)
    tl.store(starts_ptr + num_experts, tl.sum(opens.to(tl.int32), 0))


@triton.jit(do_not_specialize=["count"])
def _align_one_chunk(
    experts_ptr,
    routes_ptr,
    offsets_ptr,
    starts_ptr,
    expert_ptr,
    first_ptr,
    rows_ptr,
    count,
    num_experts,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    keys = _keys(experts_ptr, 0, count, num_experts, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.where(bins < num_experts, tl.histogram(keys // CHUNK, BINS), 0)
    begin = tl.cumsum(counts, 0) - counts
    tl.store(offsets_ptr + bins, begin, mask=bins <= num_experts)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    past = tl.cumsum(blocks, 0)
    tl.store(starts_ptr + bins, past - blocks, mask=bins <= num_experts)
    _write_blocks(expert_ptr, first_ptr, rows_ptr, bins, begin, counts, past - blocks, blocks, BLOCK_M)
    place = tl.arange(0, CHUNK)
    tl.store(routes_ptr + place, tl.sort(keys) % CHUNK, mask=place < count)


@triton.jit
def _write_blocks(expert_ptr, first_ptr, rows_ptr, expert, begin, counts, start, blocks, BLOCK_M: tl.constexpr):
    """Blocks start..start + blocks - 1 of each expert."""
    most = tl.max(blocks, 0)
    j = 0
    while j < most:
        tl.store(expert_ptr + start + j, expert, mask=j < blocks)
        tl.store(first_ptr + start + j, begin + j * BLOCK_M, mask=j < blocks)
        tl.store(rows_ptr + start + j, tl.minimum(counts - j * BLOCK_M, BLOCK_M), mask=j < blocks)
        j += 1


@triton.jit(do_not_specialize=["count"])
def _count_chunk(experts_ptr, counts_ptr, count, num_experts, BINS: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    counts = tl.histogram(_keys(experts_ptr, chunk, count, num_experts, CHUNK) // CHUNK, BINS)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["chunks"])
def _place_chunks(counts_ptr, offsets_ptr, chunks, num_experts, BINS: tl.constexpr):
    """Each chunk's count becomes the place of its expert's first route, less its place in the sorted chunk."""
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    chunk = 0
    while chunk < chunks:
        total += tl.load(counts_ptr + chunk * BINS + bins)
        chunk += 1
    place = tl.cumsum(total, 0) - total
    tl.store(offsets_ptr + bins, place, mask=bins <= num_experts)
    chunk = 0
    while chunk < chunks:
        counts = tl.load(counts_ptr + chunk * BINS + bins)
        tl.store(counts_ptr + chunk * BINS + bins, place - (tl.cumsum(counts, 0) - counts))
        place += counts
        chunk += 1


@triton.jit(do_not_specialize=["count"])
def _sort_chunk(experts_ptr, places_ptr, routes_ptr, count, num_experts, BINS: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    keys = tl.sort(_keys(experts_ptr, chunk, count, num_experts, CHUNK))
    expert = keys // CHUNK
    place = tl.load(places_ptr + chunk * BINS + expert) + tl.arange(0, CHUNK)
    tl.store(routes_ptr + place, chunk * CHUNK + keys % CHUNK, mask=expert < num_experts)


@triton.jit
def _block_table(
    offsets_ptr,
    starts_ptr,
    expert_ptr,
    first_ptr,
    rows_ptr,
    num_experts,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
):
    lowest = tl.program_id(0) * EXPERTS_PER_PROGRAM
    bins = tl.arange(0, BINS)
    begin = tl.load(offsets_ptr + bins, mask=bins < lowest, other=0)
    end = tl.load(offsets_ptr + bins + 1, mask=bins < lowest, other=0)
    before = tl.sum((end - begin + BLOCK_M - 1) // BLOCK_M, 0)

    expert = lowest + tl.arange(0, EXPERTS_PER_PROGRAM)
    mine = expert < num_experts
    begin = tl.load(offsets_ptr + expert, mask=mine, other=0)
    end = tl.load(offsets_ptr + expert + 1, mask=mine, other=0)
    blocks = (end - begin + BLOCK_M - 1) // BLOCK_M
    past = before + tl.cumsum(blocks, 0)
    tl.store(starts_ptr + expert + 1, past, mask=mine)
    tl.store(starts_ptr, 0, mask=lowest == 0)
    _write_blocks(expert_ptr, first_ptr, rows_ptr, expert, begin, end - begin, past - blocks, blocks, BLOCK_M)
