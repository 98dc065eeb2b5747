# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: a part of a layer is asked for, all but what is resident; one program."""

import functools
from typing import Any

import triton
import triton.language as tl

from kernels.admit.device import DeviceAdmission
from kernels.admit.state import AdmissionState
from kernels.admit.stream import DeviceStream
from kernels.admit.tri_ring import (
    CLEARED,
    CONSUMED,
    ERROR,
    HEAD,
    LANDED,
    NOT_LANDED,
    STREAM,
    cell_of,
    load_error,
    note_failures,
    store_release,
    wait_for_room,
    write_header,
    write_pairs,
)

WARPS = 4
SCALARS = [
    "ring",
    "capacity",
    "spin_limit",
    "layer",
    "part",
    "turn",
    "experts",
    "group_slots",
    "groups",
    "first_flag",
    "first_slot",
]


@triton.jit(do_not_specialize=SCALARS)
def request_kernel(
    slot_of,  # [L, E] int32
    tables,  # [groups, E] int32
    flags,  # [groups] int32
    stats,  # [L, 2] int64
    control,  # [6] int32
    ring,
    capacity,
    spin_limit,
    layer,
    part,
    turn,
    experts,
    group_slots,
    groups,
    first_flag,
    first_slot,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
    THREADS: tl.constexpr,
    PTX: tl.constexpr,
):
    e = tl.arange(0, BLOCK_E)
    place = e - part * group_slots
    mine = (place >= 0) & (place < group_slots) & (e < experts)
    resident = tl.load(slot_of + layer * experts + e, mine, -1)
    i = tl.arange(0, 2)
    tallies = stats + 2 * layer + i
    counters = tl.load(tallies)
    note_failures(flags, control, groups, BLOCK_F)
    absent = mine & (resident < 0)
    counts = tl.sum(mine.to(tl.int32) + (absent.to(tl.int32) << 16))
    n = counts >> 16
    slot = tl.where(absent, first_slot + turn * group_slots + place, resident)
    tl.store(tables + turn * experts + e, tl.where(mine, slot, -1), e < experts)
    tl.store(tallies, counters + tl.where(i == 0, (counts & 0xFFFF) - n, n))
    if n == 0:
        tl.store(flags + turn, LANDED)
    else:
        head = tl.load(control + HEAD)
        consumed, error = wait_for_room(
            ring,
            head,
            tl.load(control + CONSUMED),
            capacity,
            spin_limit,
            load_error(control, THREADS, PTX),
            control,
            THREADS,
            PTX,
        )
        if error != 0:
            tl.store(flags + turn, NOT_LANDED)
            tl.store(control + ERROR, error)
        else:
            tl.store(flags + turn, CLEARED)
            cell = cell_of(ring, head, capacity)
            write_header(cell, first_flag + turn, STREAM, layer, n)
            write_pairs(cell, tl.cumsum(absent.to(tl.int32), 0) - 1, e, slot, absent)
            store_release(cell, head + 1, THREADS, PTX)
            tl.store(control + HEAD, head + 1)
        tl.store(control + CONSUMED, consumed)


@functools.cache
def launch_options(experts: int, groups: int) -> dict[str, Any]:
    """The constants that a size compiles for."""
    return {
        "BLOCK_E": max(32, triton.next_power_of_2(experts)),
        "BLOCK_F": max(32, triton.next_power_of_2(groups)),
        "THREADS": 32 * WARPS,
        "PTX": isinstance(request_kernel, triton.JITFunction),
        "num_warps": WARPS,
    }


def request_part(
    state: AdmissionState, admission: DeviceAdmission, stream: DeviceStream, layer: int, part: int, turn: int
) -> None:
    """See `kernels.admit.request_part`."""
    request_kernel[(1,)](
        state.slot_of,
        stream.tables,
        stream.flags,
        stream.stats,
        admission.control,
        admission.ring,
        admission.capacity,
        admission.spin_limit,
        layer,
        part,
        turn,
        state.experts,
        stream.group_slots,
        stream.groups,
        stream.first_flag,
        stream.first_slot,
        **launch_options(state.experts, stream.groups),
    )
