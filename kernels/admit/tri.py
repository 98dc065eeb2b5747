# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Admission of a whole layer on the device: one program (CTA), one launch, no word to the host but the ring.

One program is enough: the work is a few passes over S stamps, which fit in its registers (25,000 of them are 64 words a
thread), and a program of its own needs no barrier across the grid. The victims of all queries of a layer come from one
search: their ages do not change while the layer is admitted, because what a query hits or takes is protected from the
next. So the M oldest slots are found by bisection over ages (at most 31 passes of a compare and a sum), compacted in
slot order by one prefix sum, and, if there are several queries, sorted by age and dealt out in that order.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.admit.device import MAX_PAIRS, DeviceAdmission
from kernels.admit.state import AdmissionState

HEAD, CONSUMED, ERROR, QUERIES, AT_ONCE = (tl.constexpr(i) for i in range(5))
"""Words of `control`: number of the next record, of the reader as last seen, error, and the layer's cut."""

RING_FULL = tl.constexpr(1)
CLEARED, LANDED, FAILED = (tl.constexpr(i) for i in range(3))
RING_CONSUMED, RING_CELLS, CELL_WORDS, CELL_PAIRS = (tl.constexpr(i) for i in (16, 48, 272, 16))
"""Words of the ring, as its reader in the copy engine has them."""

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
    "num_flags",
    "first_flag",
]


@triton.jit
def load_acquire(address, THREADS: tl.constexpr, PTX: tl.constexpr):
    """A word of host memory, read once and given to all threads. No atomic: over PCIe one could undo a host write."""
    lane = tl.arange(0, THREADS)
    if PTX:
        value = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $2, 0; mov.b32 $0, 0; @p ld.acquire.sys.global.b32 $0, [$1]; }",
            "=&r,l,r",
            [address, lane],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        value = tl.where(lane == 0, tl.load(address.to(tl.pointer_type(tl.int32))), 0)
    return tl.sum(value)


@triton.jit
def store_release(address, word, THREADS: tl.constexpr, PTX: tl.constexpr):
    """Write a word of host memory from one thread, after all that the program wrote before."""
    tl.debug_barrier()
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $3, 0; @p st.release.sys.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [address, word, tl.arange(0, THREADS)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(address.to(tl.pointer_type(tl.int32)), word)


@triton.jit
def cut_layer(offsets, row, query_of, control, experts, slots, max_query, BLOCK_E: tl.constexpr):
    """Number the queries of the layer's distinct experts, -1 for the others, into `query_of`."""
    e = tl.arange(0, BLOCK_E)
    in_row = e < experts
    routed = in_row & (tl.load(offsets + e + 1, in_row, 0) > tl.load(offsets + e, in_row, 0))
    distinct = tl.sum(routed.to(tl.int32))
    at_once = distinct <= slots
    resident = tl.load(row + e, in_row, -1) >= 0
    first = routed & resident & (distinct > slots)  # of an over-full layer what is resident comes first
    later = routed & (first == 0)
    longest = tl.minimum(max_query, slots)
    ranks = tl.cumsum(first.to(tl.int32) + (later.to(tl.int32) << 16), 0)
    first_queries = tl.cdiv(tl.sum(first.to(tl.int32)), longest)
    later_queries = tl.cdiv(tl.sum(later.to(tl.int32)), longest)
    number = tl.where(first, ((ranks & 0xFFFF) - 1) // longest, first_queries + ((ranks >> 16) - 1) // longest)
    tl.store(query_of + e, tl.where(routed, number, -1), in_row)
    tl.store(control + QUERIES, first_queries + later_queries)
    tl.store(control + AT_ONCE, at_once.to(tl.int32))


@triton.jit
def write_ages(ages, owner, last_used, query_of, now, layer, index, experts, slots, CHUNK: tl.constexpr):
    """[S] int32: admissions since each slot was used; free ones are older than all, -1 for those not to take.

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
    """The age of the `count`-th oldest slot, and how many of that age are among the `count` oldest."""
    s = tl.arange(0, BLOCK_S)
    age = tl.load(ages + s, s < slots, -1)
    low = 0  # at least `count` slots are this old
    high = tl.max(age, 0) + 1  # fewer are
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((age >= middle).to(tl.int32)) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low, count - tl.sum((age > low).to(tl.int32))


@triton.jit
def take_oldest(ages, slots, count, oldest, victims, several, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr):
    """The `count` oldest slots, of equals the lowest, in slot order: to `victims`, or with their ages to `oldest`."""
    last, of_equals = age_of_the_last(ages, slots, count, BLOCK_S)
    seen = 0  # in slots before: of the last age, and, 16 bits up, older ones
    begin = 0
    while begin < slots:
        s = begin + tl.arange(0, CHUNK)
        age = tl.load(ages + s, s < slots, -1)
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
def write_record(ring, head, capacity, flag, layer, missing, victims, start, n, MAX_PAIRS: tl.constexpr):
    """The body of a demand record: all but its sequence number."""
    cell = ring.to(tl.pointer_type(tl.int32)) + ((head & (capacity - 1)) * CELL_WORDS + RING_CELLS)
    word = tl.arange(0, 4)
    tl.store(cell + 1 + word, tl.where(word == 0, flag, tl.where(word == 2, layer, tl.where(word == 3, n, 0))))
    i = tl.arange(0, MAX_PAIRS)
    expert = tl.load(missing + start + i, i < n, 0)
    slot = tl.load(victims + start + i, i < n, 0)
    pairs = (cell + CELL_PAIRS).to(tl.pointer_type(tl.int64))
    tl.store(pairs + i, expert.to(tl.int64) | (slot.to(tl.int64) << 32), i < n)


@triton.jit(do_not_specialize=SCALARS)
def admit_kernel(
    offsets,  # [E + 1] int32
    slot_of,  # [L, E] int32
    owner,  # [S] int32
    last_used,  # [S] int64
    clock,  # [] int64
    query_of,  # [E] int32
    table,  # [E] int32
    flags,  # [F] int32
    stats,  # [3] int64
    control,  # [5] int32
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
    num_flags,
    first_flag,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_F: tl.constexpr,
    MAX_PAIRS: tl.constexpr,
    THREADS: tl.constexpr,
    PTX: tl.constexpr,
):
    row = slot_of + layer * experts
    ring_address = ring.to(tl.int64)
    if index == 0:
        cut_layer(offsets, row, query_of, control, experts, slots, max_query, BLOCK_E)
    tl.debug_barrier()
    e = tl.arange(0, BLOCK_E)
    in_row = e < experts
    query = tl.load(query_of + e, in_row, -1)
    slot = tl.load(row + e, in_row, -1)
    queries = tl.load(control + QUERIES)
    at_once = tl.load(control + AT_ONCE)
    now = tl.load(clock)
    error = tl.load(control + ERROR)
    head = tl.load(control + HEAD)
    consumed = tl.load(control + CONSUMED)
    tl.debug_barrier()  # from here on the tables change

    # This launch admits queries index..end - 1: all that the layer has, or of an over-full layer one.
    end = tl.where(at_once != 0, tl.where(index == 0, queries, 0), tl.minimum(index + 1, queries))
    member = (query >= index) & (query < end)
    hit = member & (slot >= 0)
    miss = member & (slot < 0)
    misses = tl.sum(miss.to(tl.int32))
    if index == 0:
        f = tl.arange(0, BLOCK_F)
        tl.store(flags + f, LANDED, (f >= queries) & (f < num_flags))
    if misses > 0:
        tl.store(missing + tl.cumsum(miss.to(tl.int32), 0) - 1, e, miss)
        write_ages(ages, owner, last_used, query_of, now, layer, index, experts, slots, CHUNK)
        take_oldest(ages, slots, misses, oldest, victims, end - index > 1, BLOCK_S, CHUNK)
        if end - index > 1:
            deal_out(oldest, missing, query_of, victims, misses, BLOCK_M)
        move_in(missing, victims, query_of, slot_of, row, owner, last_used, now, layer, index, experts, misses, BLOCK_M)
    tl.store(last_used + slot, now + query - index + 1, hit)
    if (index == 0) | (end > index):
        tl.store(table + e, tl.where(member, tl.load(row + e, in_row, -1), -1), in_row)

    number = index
    start = 0
    while number < end:
        n = tl.sum((miss & (query == number)).to(tl.int32))
        if n == 0:
            tl.store(flags + number, LANDED)
        else:
            spins = 0
            while (head - consumed >= capacity) & (spins < spin_limit) & (error == 0):
                consumed = load_acquire(ring_address + RING_CONSUMED * 4, THREADS, PTX)
                spins += 1
            if head - consumed >= capacity:
                error = RING_FULL
            if error != 0:
                tl.store(flags + number, FAILED)
            else:
                tl.store(flags + number, CLEARED)
                write_record(
                    ring_address, head, capacity, first_flag + number, layer, missing, victims, start, n, MAX_PAIRS
                )
                cell = (head & (capacity - 1)) * CELL_WORDS + RING_CELLS
                head += 1
                store_release(ring_address + cell * 4, head, THREADS, PTX)
            start += n
        number += 1

    tl.store(control + ERROR, error)
    tl.store(control + HEAD, head)
    tl.store(control + CONSUMED, consumed)
    if end > index:
        tl.store(clock, now + end - index)
        hits = tl.sum(hit.to(tl.int32))
        tl.store(stats, tl.load(stats) + hits)
        tl.store(stats + 1, tl.load(stats + 1) + misses)
        tl.store(stats + 2, tl.load(stats + 2) + end - index)


def launch_options(experts: int, slots: int, flags: int) -> dict[str, Any]:
    """The constants that a size compiles for: powers of two, so that few sizes need a kernel of their own."""
    warps = 8 if slots <= 4096 and experts <= 1024 else 16
    return {
        "BLOCK_E": max(32, triton.next_power_of_2(experts)),
        "BLOCK_S": max(32, triton.next_power_of_2(slots)),
        "BLOCK_M": max(32, triton.next_power_of_2(min(experts, slots))),
        "CHUNK": min(CHUNK, max(32, triton.next_power_of_2(slots))),
        "BLOCK_F": max(32, triton.next_power_of_2(flags)),
        "MAX_PAIRS": MAX_PAIRS,
        "THREADS": 32 * warps,
        "PTX": isinstance(admit_kernel, triton.JITFunction),
        "num_warps": warps,
    }


def admit_layer(state: AdmissionState, device: DeviceAdmission, layer: int, offsets: Tensor, index: int) -> None:
    """See `kernels.admit.admit_layer`."""
    admit_kernel[(1,)](
        offsets,
        state.slot_of,
        state.owner,
        state.last_used,
        state.clock,
        device.query_of,
        device.table,
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
        device.flags.numel(),
        device.first_flag,
        **launch_options(state.experts, state.slots, device.flags.numel()),
    )
