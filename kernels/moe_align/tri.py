# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: a stable counting sort by expert, and the table of row blocks.

The routes are cut into chunks; a chunk is sorted by one program on keys expert * CHUNK + place, which makes the order
stable, and knows from the counts of all chunks where each expert's routes go. One chunk needs one launch.
"""

import torch
import triton
import triton.language as tl

CHUNK = 1024
"""Routes a program sorts."""

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


@triton.jit
def _sort_one_chunk(experts_ptr, routes_ptr, offsets_ptr, count, num_experts, BINS: tl.constexpr, CHUNK: tl.constexpr):
    keys = _keys(experts_ptr, 0, count, num_experts, CHUNK)
    counts = tl.histogram(keys // CHUNK, BINS)
    bins = tl.arange(0, BINS)
    tl.store(offsets_ptr + bins, tl.cumsum(counts, 0) - counts, mask=bins <= num_experts)
    place = tl.arange(0, CHUNK)
    tl.store(routes_ptr + place, tl.sort(keys) % CHUNK, mask=place < count)


@triton.jit
def _count_chunk(experts_ptr, counts_ptr, count, num_experts, BINS: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    counts = tl.histogram(_keys(experts_ptr, chunk, count, num_experts, CHUNK) // CHUNK, BINS)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), counts)


@triton.jit
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


@triton.jit
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
    most = tl.max(blocks, 0)
    j = 0
    while j < most:
        block = past - blocks + j
        row = begin + j * BLOCK_M
        tl.store(expert_ptr + block, expert, mask=j < blocks)
        tl.store(first_ptr + block, row, mask=j < blocks)
        tl.store(rows_ptr + block, tl.minimum(end - row, BLOCK_M), mask=j < blocks)
        j += 1
