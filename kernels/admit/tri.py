# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Admission of a whole layer on the device: one program (CTA), one launch, no word to the host but the ring.

One program is enough: the work is a few passes over S stamps, which fit in its registers (25,000 of them are 64 words a
thread), and a program of its own needs no barrier across the grid. The victims of all queries of a layer come from one
search: their ages do not change while the layer is admitted, because what a query hits or takes is protected from the
next. So the M oldest slots are found by bisection over ages (at most 31 passes of a compare and a sum), compacted in
slot order by one prefix sum, and, if there are several queries, sorted by age and dealt out in that order.

A layer whose experts are all there, which most are in decode, takes one round of loads, one sum and one of stores.
"""

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.admit import lrfu
from kernels.admit.device import MAX_PAIRS, DeviceAdmission, most_queries
from kernels.admit.state import AdmissionState
from kernels.admit.tri_ring import (
    AT_ONCE,
    CLEARED,
    CONSUMED,
    DEMAND,
    ERROR,
    HEAD,
    LANDED,
    NOT_LANDED,
    QUERIES,
    cell_of,
    load_error,
    note_failures,
    store_release,
    wait_for_room,
    write_header,
    write_pairs,
)

REACH = tl.constexpr(lrfu.REACH)
STEPS = tl.constexpr(lrfu.STEPS)
OLDEST = tl.constexpr(2**31 - 2)
CHUNK = 8192
"""Slots looked at together where registers are short."""

SCALARS = [
    "ring",
    "capacity",
    "spin_limit",
    "layer",
    "index",
    "experts",
    "slots",
    "max_query",
    "num_spans",
    "num_flags",
    "first_flag",
    "count",
]


@triton.jit
def cut_layer(
    routed,
    slot,
    distinct,
    query_of,
    spans,
    control,
    experts,
    slots,
    max_query,
    num_spans,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """The query of each of the layer's distinct experts, -1 for the others, and how many queries there are.

    Kept for the launches that follow, with the bounds of the queries' experts. One query needs no prefix sum.
    """
    longest = tl.minimum(max_query, slots)
    q = tl.arange(0, BLOCK_Q)
    tl.store(spans + 2 * q, 0, q < num_spans)
    if distinct <= longest:
        query = tl.where(routed, 0, -1)
        queries = tl.minimum(distinct, 1)
        tl.store(spans + 2 * q + 1, tl.where(q < queries, experts, 0), q < num_spans)
    else:
        fits = distinct <= slots
        first = routed & (slot >= 0) & (fits == 0)  # of an over-full layer what is resident comes first
        later = routed & (first == 0)
        ranks = tl.cumsum(first.to(tl.int32) + (later.to(tl.int32) << 16), 0)
        firsts = tl.sum(first.to(tl.int32))
        first_queries = tl.cdiv(firsts, longest)
        rank = tl.where(first, ranks & 0xFFFF, ranks >> 16) - 1
        query = tl.where(routed, tl.where(first, 0, first_queries) + rank // longest, -1)
        queries = first_queries + tl.cdiv(distinct - firsts, longest)
        tl.store(spans + 2 * q + 1, tl.where(q < queries, experts, 0), q < num_spans)
        if fits:
            e = tl.arange(0, BLOCK_E)
            bound = (query > 0) & (rank % longest == 0)
            tl.debug_barrier()
            tl.store(spans + 2 * query, e, bound)
            tl.store(spans + 2 * query - 1, e, bound)
    e = tl.arange(0, BLOCK_E)
    tl.store(query_of + e, query, e < experts)
    tl.store(control + QUERIES, queries)
    tl.store(control + AT_ONCE, (distinct <= slots).to(tl.int32))
    return query, queries


@triton.jit
def write_ages(ages, owner, last_used, query_of, now, layer, index, experts, slots, CHUNK: tl.constexpr):
    """[S] int32: admissions from each slot's stamp to `now`, which no stamp is behind; free ones are older than all, -1
    for those not to take.

    By chunks, for the 64-bit stamps of 25,000 slots at a time do not fit in registers.
    """
    begin = 0
    while begin < slots:
        s = begin + tl.arange(0, CHUNK)
        there = s < slots
        expert = tl.load(owner + s, there, -1) - layer * experts
        of_layer = there & (expert >= 0) & (expert < experts)
        needed = tl.load(query_of + expert, of_layer, -1) >= index
        used = tl.load(last_used + s, there, 0)
        age = tl.minimum(now - used, tl.where(used < 0, OLDEST, OLDEST - 1)).to(tl.int32)
        tl.store(ages + s, tl.where(needed, -1, age), there)
        begin += CHUNK
    tl.debug_barrier()


@triton.jit
def age_of_the_last(ages, slots, count, BLOCK_S: tl.constexpr):
    """The age of the `count`-th oldest slot, and how many of that age are among the `count` oldest.

    And the age that free slots are taken to have, one more than any used one's: the range is halved until it is found.
    """
    s = tl.arange(0, BLOCK_S)
    age = tl.load(ages + s, s < slots, -1)
    free = tl.max(tl.where(age == OLDEST, -1, age), 0) + 1
    age = tl.minimum(age, free)
    low = 0  # at least `count` slots are this old
    high = free + 1  # fewer are
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((age >= middle).to(tl.int32)) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low, count - tl.sum((age > low).to(tl.int32)), free


@triton.jit
def take_oldest(ages, slots, count, oldest, victims, several, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr):
    """The `count` oldest slots, of equals the lowest, in slot order: to `victims`, or with their ages to `oldest`."""
    last, of_equals, free = age_of_the_last(ages, slots, count, BLOCK_S)
    seen = 0  # in slots before: of the last age, and, 16 bits up, older ones
    begin = 0
    while begin < slots:
        s = begin + tl.arange(0, CHUNK)
        age = tl.minimum(tl.load(ages + s, s < slots, -1), free)
        older = (age > last).to(tl.int32)
        equal = (age == last).to(tl.int32)
        before = seen + tl.cumsum(equal + (older << 16), 0) - equal - (older << 16)
        equals_before = before & 0xFFFF
        taken = (older > 0) | ((equal > 0) & (equals_before < of_equals))
        place = (before >> 16) + tl.minimum(equals_before, of_equals)
        if several:
            tl.store(oldest + place, (((-age) + OLDEST).to(tl.int64) << 16) | s, taken)
        else:
            tl.store(victims + place, s, taken)
        seen += tl.sum(equal + (older << 16))
        begin += CHUNK
    tl.debug_barrier()


@triton.jit
def deal_out(oldest, missing, query_of, victims, count, BLOCK_M: tl.constexpr):
    """Give the slots in `oldest`, by age, to one query after the other; within a query in slot order."""
    r = tl.arange(0, BLOCK_M)
    there = r < count
    by_age = tl.sort(tl.load(oldest + r, there, 0x7FFFFFFFFFFFFFFF))
    number = tl.load(query_of + tl.load(missing + r, there, 0), there, 0)
    by_query = tl.sort(tl.where(there, (number << 16) | (by_age & 0xFFFF).to(tl.int32), 0x7FFFFFFF))
    tl.store(victims + r, by_query & 0xFFFF, there)
    tl.debug_barrier()


@triton.jit
def move_in(
    missing, victims, query_of, slot_of, row, owner, last_used, now, layer, index, experts, count, BLOCK_M: tl.constexpr
):
    """Evict what is in the victims and enter the missing experts."""
    r = tl.arange(0, BLOCK_M)
    there = r < count
    slot = tl.load(victims + r, there, 0)
    expert = tl.load(missing + r, there, 0)
    number = tl.load(query_of + expert, there, 0)
    evicted = tl.load(owner + slot, there, -1)
    tl.store(slot_of + evicted, -1, there & (evicted >= 0))
    tl.debug_barrier()
    tl.store(row + expert, slot, there)
    tl.store(owner + slot, layer * experts + expert, there)
    tl.store(last_used + slot, now + number - index + 1, there)
    tl.debug_barrier()


@triton.jit
def write_record(cell, flag, layer, missing, victims, start, n, MAX_PAIRS: tl.constexpr):
    """The body of a demand record: all but its sequence number."""
    write_header(cell, flag, DEMAND, layer, n)
    i = tl.arange(0, MAX_PAIRS)
    expert = tl.load(missing + start + i, i < n, 0)
    write_pairs(cell, i, expert, tl.load(victims + start + i, i < n, 0), i < n)


@triton.jit
def scored(last_used, time, hit, bumps, count, HALF_LIFE: tl.constexpr):
    """The stamps of the slots hit at `time`: see kernels.admit.ref._use."""
    before = tl.load(last_used, hit, 0)
    from_first = tl.minimum(tl.maximum(time - before + HALF_LIFE * REACH, 0), HALF_LIFE * (2 * REACH) - 1)
    bump = tl.load(bumps + from_first * STEPS // HALF_LIFE, hit & (count != 0), 0)
    return tl.maximum(before, time + bump)


@triton.jit(do_not_specialize=SCALARS)
def admit_kernel(
    offsets,  # [E + 1] int32
    slot_of,  # [L, E] int32
    owner,  # [S] int32
    last_used,  # [S] int64
    clock,  # [] int64
    bumps,  # [N] int64; None without a half-life
    query_of,  # [E] int32
    table,  # [E] int32
    spans,  # [Q, 2] int32
    routing,  # [L, E] int64
    flags,  # [F] int32
    stats,  # [L, 3] int64
    control,  # [6] int32
    ages,  # [S] int32, scratch as the next three
    oldest,  # [min(E, S)] int64
    missing,  # [min(E, S)] int32
    victims,  # [min(E, S)] int32
    ring,
    capacity,
    spin_limit,
    layer,
    index,
    experts,
    slots,
    max_query,
    num_spans,
    num_flags,
    first_flag,
    count,
    FIRST: tl.constexpr,
    HALF_LIFE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_F: tl.constexpr,
    MAX_PAIRS: tl.constexpr,
    THREADS: tl.constexpr,
    PTX: tl.constexpr,
):
    row = slot_of + layer * experts
    e = tl.arange(0, BLOCK_E)
    in_row = e < experts
    slot = tl.load(row + e, in_row, -1)
    now = tl.load(clock)
    i = tl.arange(0, 4)
    tallies = stats + 3 * layer + i
    counters = tl.load(tallies, i < 3, 0)

    # This launch admits queries index..end - 1: all that the layer has, or of an over-full layer one.
    if FIRST:
        routed = in_row & (tl.load(offsets + e + 1, in_row, 0) > tl.load(offsets + e, in_row, 0))
        counted = routed & (count != 0)
        times = tl.load(routing + layer * experts + e, counted, 0)
        tl.store(routing + layer * experts + e, times + 1, counted)
        note_failures(flags, control, num_flags, BLOCK_F)
        distinct = tl.sum(routed.to(tl.int32))
        query, queries = cut_layer(
            routed, slot, distinct, query_of, spans, control, experts, slots, max_query, num_spans, BLOCK_E, BLOCK_Q
        )
        end = tl.where(distinct <= slots, queries, 1)
        member = (query >= 0) & (query < end)
    else:
        note_failures(flags, control, num_flags, BLOCK_F)
        query = tl.load(query_of + e, in_row, -1)
        queries = tl.load(control + QUERIES)
        end = tl.where(tl.load(control + AT_ONCE) != 0, 0, tl.minimum(index + 1, queries))
        member = (query >= index) & (query < end)
    counts = tl.sum(member.to(tl.int32) + ((member & (slot < 0)).to(tl.int32) << 16))
    misses = counts >> 16
    hit = member & (slot >= 0)
    miss = member & (slot < 0)
    f = tl.arange(0, BLOCK_F)
    landed = (f >= index) & (f < end) & (misses == 0)
    if FIRST:
        landed = landed | (f >= queries)
    tl.store(flags + f, LANDED, landed & (f < num_flags))

    if misses > 0:
        tl.debug_barrier()  # from here on the tables change
        tl.store(missing + tl.cumsum(miss.to(tl.int32), 0) - 1, e, miss)
        # A scored policy's stamps lie up to REACH half-lives behind the clock.
        latest = now + HALF_LIFE * REACH
        write_ages(ages, owner, last_used, query_of, latest, layer, index, experts, slots, CHUNK)
        take_oldest(ages, slots, misses, oldest, victims, end - index > 1, BLOCK_S, CHUNK)
        if end - index > 1:
            deal_out(oldest, missing, query_of, victims, misses, BLOCK_M)
        move_in(missing, victims, query_of, slot_of, row, owner, last_used, now, layer, index, experts, misses, BLOCK_M)
        tl.store(table + e, tl.where(member, tl.load(row + e, in_row, -1), -1), in_row)

        error = load_error(control, THREADS, PTX)
        head = tl.load(control + HEAD)
        consumed = tl.load(control + CONSUMED)
        number = index
        start = 0
        while number < end:
            n = tl.sum((miss & (query == number)).to(tl.int32))  # not under a condition: Triton 3.6 then loses a 0
            if n == 0:
                tl.store(flags + number, LANDED)
            else:
                consumed, error = wait_for_room(
                    ring, head, consumed, capacity, spin_limit, error, control, THREADS, PTX
                )
                if error != 0:
                    tl.store(flags + number, NOT_LANDED)
                else:
                    tl.store(flags + number, CLEARED)
                    cell = cell_of(ring, head, capacity)
                    write_record(cell, first_flag + number, layer, missing, victims, start, n, MAX_PAIRS)
                    head += 1
                    store_release(cell, head, THREADS, PTX)
                start += n
            number += 1
        tl.store(control + ERROR, error, error != 0)  # not a 0 over what the host has written meanwhile
        tl.store(control + HEAD, head)
        tl.store(control + CONSUMED, consumed)
    elif (end > index) | FIRST:
        tl.store(table + e, tl.where(hit, slot, -1), in_row)
    if HALF_LIFE > 0:
        stamp = scored(last_used + slot, now + query - index + 1, hit, bumps, count, HALF_LIFE)
        tl.store(last_used + slot, stamp, hit)
    else:
        tl.store(last_used + slot, now + query - index + 1, hit)
    if end > index:
        tl.store(clock, now + end - index)
        hits = (counts & 0xFFFF) - misses
        tl.store(tallies, counters + tl.where(i == 0, hits, tl.where(i == 1, misses, end - index)), i < 3)


@functools.cache
def launch_options(experts: int, slots: int, max_query: int, flags: int) -> dict[str, Any]:
    """The constants that a size compiles for: powers of two, so that few sizes need a kernel of their own."""
    warps = 8 if slots <= 4096 and experts <= 1024 else 16
    return {
        "BLOCK_E": max(32, triton.next_power_of_2(experts)),
        "BLOCK_S": max(32, triton.next_power_of_2(slots)),
        "BLOCK_M": max(32, triton.next_power_of_2(min(experts, slots))),
        "CHUNK": min(CHUNK, max(32, triton.next_power_of_2(slots))),
        "BLOCK_Q": max(32, triton.next_power_of_2(most_queries(experts, slots, max_query))),
        "BLOCK_F": max(32, triton.next_power_of_2(flags)),
        "MAX_PAIRS": MAX_PAIRS,
        "THREADS": 32 * warps,
        "PTX": isinstance(admit_kernel, triton.JITFunction),
        "num_warps": warps,
    }


def admit_layer(
    state: AdmissionState, device: DeviceAdmission, layer: int, offsets: Tensor, index: int, count_routing: bool
) -> None:
    """See `kernels.admit.admit_layer`."""
    num_flags = device.flags.shape[0]
    admit_kernel[(1,)](
        offsets,
        state.slot_of,
        state.owner,
        state.last_used,
        state.clock,
        state.bumps if state.half_life else None,
        device.query_of,
        device.table,
        device.spans,
        device.routing,
        device.flags,
        device.stats,
        device.control,
        *device.scratch,
        device.ring,
        device.capacity,
        device.spin_limit,
        layer,
        index,
        state.experts,
        state.slots,
        device.max_query,
        device.spans.shape[0],
        num_flags,
        device.first_flag,
        int(count_routing),
        FIRST=index == 0,
        HALF_LIFE=state.half_life,
        **launch_options(state.experts, state.slots, device.max_query, num_flags),
    )
