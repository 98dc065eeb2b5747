# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: a program for each part of each record, and one that compares. No sum depends on the order of programs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checksum import RecordChecks

WARPS = 4


@triton.jit
def in_use(slot_of, offsets, span, expert, there, ROUTED: tl.constexpr):
    """Whether a GEMM over `span` reads the records of `expert`; any in a slot without ROUTED."""
    used = there & (tl.load(slot_of + expert, there, -1) >= 0)
    if ROUTED:
        used = used & (expert < tl.load(span + 1))
        used = used & (tl.load(offsets + expert + 1, there, 0) > tl.load(offsets + expert, there, 0))
    return used


@triton.jit(do_not_specialize=["experts", "num_quads"])
def sum_kernel(
    pool,  # [P, 4 * num_quads] int32
    slot_of,  # [experts] int32
    offsets,  # [experts + 1] int32; None without ROUTED, as span
    span,  # [2] int32
    within,  # [BLOCK] int64
    blocks,  # [ceil(4 * num_quads / BLOCK)] int64
    partial,  # [experts, SPLITS] int64
    experts,
    num_quads,
    ROUTED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    if ROUTED:
        expert += tl.load(span)
    split = tl.program_id(1)
    if in_use(slot_of, offsets, span, expert, expert < experts, ROUTED):
        lane = tl.arange(0, BLOCK)
        num_words = num_quads * 4  # so that the compiler knows: a thread reads 16 bytes at a time
        record = pool + tl.load(slot_of + expert).to(tl.int64) * num_words
        sums = tl.zeros([BLOCK], tl.int64)
        block = split
        while block * BLOCK < num_words:
            at = block * BLOCK + lane
            words = tl.load(record + at, at < num_words, 0).to(tl.int64)
            sums += words * tl.load(blocks + block)
            block += SPLITS
        total = tl.sum(sums * tl.load(within + lane))
        tl.store(partial + expert.to(tl.int64) * SPLITS + split, total)


@triton.jit(do_not_specialize=["layer", "experts"])
def compare_kernel(
    slot_of,  # [experts] int32
    offsets,  # [experts + 1] int32
    span,  # [2] int32
    partial,  # [experts, SPLITS] int64
    expected,  # [L, experts] int64
    damage,  # [2] int64
    layer,
    experts,
    SPLITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    e = tl.arange(0, BLOCK_E)
    used = in_use(slot_of, offsets, span, e, (e >= tl.load(span)) & (e < experts), True)
    total = tl.zeros([BLOCK_E], tl.int64)
    for split in range(SPLITS):
        total += tl.load(partial + e * SPLITS + split, used, 0)
    wrong = used & (total != tl.load(expected + layer * experts + e, used, 0))
    count = tl.sum(wrong.to(tl.int32))
    if count > 0:
        before = tl.load(damage)
        first = layer * experts + tl.min(tl.where(wrong, e, BLOCK_E))
        tl.store(damage + 1, first.to(tl.int64), before == 0)
        tl.store(damage, before + count)


def check_records(
    checks: RecordChecks, layer: int, pool: Tensor, slot_of: Tensor, span: Tensor, offsets: Tensor, reach: int
) -> None:
    """See `kernels.checksum.check_records`."""
    experts = checks.expected.shape[1]
    _sum(checks, pool, slot_of, offsets, span, checks.partial, reach)
    compare_kernel[(1,)](
        slot_of,
        offsets,
        span,
        checks.partial,
        checks.expected,
        checks.damage,
        layer,
        experts,
        SPLITS=checks.splits,
        BLOCK_E=max(32, triton.next_power_of_2(experts)),
        num_warps=WARPS,
    )


def slot_sums(checks: RecordChecks, pool: Tensor, slots: Tensor) -> Tensor:
    """See `kernels.checksum.slot_sums`."""
    partial = torch.zeros(slots.shape[0], checks.splits, dtype=torch.int64, device=pool.device)
    _sum(checks, pool, slots, None, None, partial, slots.shape[0])
    return partial.sum(1)


def _sum(
    checks: RecordChecks,
    pool: Tensor,
    slot_of: Tensor,
    offsets: Tensor | None,
    span: Tensor | None,
    partial: Tensor,
    reach: int,
) -> None:
    words = pool.view(torch.int32)
    if reach == 0:
        return
    sum_kernel[(reach, checks.splits)](
        words,
        slot_of,
        offsets,
        span,
        checks.within,
        checks.blocks,
        partial,
        slot_of.shape[0],
        words.shape[1] // 4,
        ROUTED=span is not None,
        SPLITS=checks.splits,
        BLOCK=checks.within.shape[0],
        num_warps=WARPS,
    )
