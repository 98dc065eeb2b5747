"""Admission of whole layers on the device: what it needs besides the tables, and what it refuses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.admit.state import ABSENT, AdmissionState

MAX_EXPERTS = 4096
"""E: one program looks at all of a layer at once."""

MAX_SLOTS = 32768
"""S: one program sorts all slots at once."""

MAX_PAIRS = 128
"""Of one record of the ring: a query's experts (copyengine.protocol.MAX_QUERY)."""

SPIN_LIMIT = 1 << 24
"""Looks at a full ring before giving up: over PCIe one takes a microsecond or two, so this is half a minute at most."""

STATS = ("hits", "misses", "queries")
CONTROL_WORDS = 6
ERROR = 2
"""Word of `control` that is not 0 after a ring stayed full: from then on nothing is rung, and every query with misses
has its flag at 2 (did not land) and its experts in the tables all the same: `invalidate` them. The host may set it, by
a write on another stream, at any time; a launch that waits for room in the ring sees it and gives up."""
FAILED = 5
"""Word of `control` that is 1 once a launch has found a flag above 1 (landed) of those that it was about to set anew:
copies of some launch before did not land. Only the host clears it."""


@dataclass(frozen=True)
class DeviceAdmission:
    """Buffers of `admit_layer`, all on the device of the tables; one launch at a time uses them.

    `query_of`, `table` and `spans` are the last layer's: the query of each of its distinct experts; the slot of those
    that the last launch admitted (all of them, or of an over-full layer one query's), ABSENT for the other experts; and
    bounds for each query that there can be. If the layer fits, query q's experts are the routed ones among
    `spans[q, 0] .. spans[q, 1] - 1`; if not, each query has (0, E), and its experts are those that `table` has. Queries
    that do not exist have (0, 0). `routing` counts, by layer, how often an expert was one of a layer's distinct ones.
    """

    query_of: Tensor  # [E] int32
    table: Tensor  # [E] int32
    spans: Tensor  # [most_queries(E, S, max_query), 2] int32
    routing: Tensor  # [L, E] int64
    stats: Tensor  # [L, 3] int64: see STATS
    control: Tensor  # [CONTROL_WORDS] int32: see kernels.admit.tri_ring
    flags: Tensor  # [F] int32, the waiting stream's: 0 not yet, 1 landed, more: did not land
    first_flag: int  # what the reader of the ring calls flags[0]
    scratch: tuple[Tensor, Tensor, Tensor, Tensor]  # [S] int32, [min(E, S)] int64, int32, int32
    ring: int  # address of the ring for the device
    capacity: int  # records of the ring
    max_query: int
    spin_limit: int


def launches(experts: int, slots: int, max_query: int, distinct: int) -> int:
    """Launches of `admit_layer` for a layer of at most `distinct` distinct experts: 1 unless it may be over-full."""
    distinct = min(distinct, experts)
    return 1 if distinct <= slots else most_queries(distinct, slots, max_query)


def most_queries(distinct: int, slots: int, max_query: int) -> int:
    """Queries of a layer of at most `distinct` experts; over-full, the resident ones are cut by themselves."""
    return -(-distinct // min(max_query, slots)) + (distinct > slots)


def new_device_admission(
    state: AdmissionState,
    flags: Tensor,
    ring: int,
    capacity: int,
    max_query: int = MAX_PAIRS,
    first_flag: int = 0,
    first_record: int = 0,
    spin_limit: int = SPIN_LIMIT,
) -> DeviceAdmission:
    """Buffers for the tables of `state`.

    `flags` [F] int32 are the layer's flags, F at least `most_queries(E, S, max_query)`. `ring` is the address, for the
    device, of a ring of `capacity` records that has been made by its RingWriter with `first_record`; nobody else writes
    records. ValueError for sizes beyond MAX_EXPERTS, MAX_SLOTS or MAX_PAIRS, too few flags, or no possible ring.
    """
    experts, slots = state.experts, state.slots
    if not (1 <= experts <= MAX_EXPERTS and 1 <= slots <= MAX_SLOTS and 1 <= max_query <= MAX_PAIRS):
        raise ValueError(
            f"{experts} experts in {slots} slots by queries of {max_query}: "
            f"at least 1 and at most {MAX_EXPERTS}, {MAX_SLOTS} and {MAX_PAIRS} are possible"
        )
    need = most_queries(experts, slots, max_query)
    device = state.owner.device
    if flags.dtype != torch.int32 or not flags.is_contiguous() or flags.shape != (flags.numel(),):
        raise ValueError(f"flags must be contiguous [F] int32, not {flags.dtype} {tuple(flags.shape)}")
    if flags.device != device or flags.numel() < need:
        raise ValueError(f"{need} flags on {device} needed, not {flags.numel()} on {flags.device}")
    if capacity < 1 or capacity & (capacity - 1) or ring <= 0 or ring % 8:
        raise ValueError(f"no ring of {capacity} records can be at {ring:#x}: a power of two, 8-byte aligned")

    def zeros(n: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=device)

    control = zeros(CONTROL_WORDS)
    control[:2] = (first_record & 0xFFFFFFFF) - ((first_record & 0x80000000) << 1)
    most = min(experts, slots)
    return DeviceAdmission(
        query_of=torch.full((experts,), ABSENT, dtype=torch.int32, device=device),
        table=torch.full((experts,), ABSENT, dtype=torch.int32, device=device),
        spans=zeros(2 * need).view(need, 2),
        routing=torch.zeros_like(state.slot_of, dtype=torch.int64),
        stats=zeros(state.layers * len(STATS), torch.int64).view(state.layers, len(STATS)),
        control=control,
        flags=flags,
        first_flag=first_flag,
        scratch=(zeros(slots), zeros(most, torch.int64), zeros(most), zeros(most)),
        ring=ring,
        capacity=capacity,
        max_query=max_query,
        spin_limit=spin_limit,
    )


def check_layer(state: AdmissionState, layer: int, offsets: Tensor, index: int) -> None:
    """ValueError for a layer or index that cannot be, or offsets that are not the layer's [E + 1] int32."""
    if not 0 <= layer < state.slot_of.shape[0]:
        raise ValueError(f"layer {layer} of {state.slot_of.shape[0]}")
    if index < 0:
        raise ValueError(f"query index {index}: must be at least 0")
    if offsets.dtype != torch.int32 or offsets.shape != (state.experts + 1,) or not offsets.is_contiguous():
        raise ValueError(
            f"offsets must be contiguous [{state.experts + 1}] int32, not {offsets.dtype} {tuple(offsets.shape)}"
        )
    if offsets.device != state.owner.device:
        raise ValueError(f"offsets on {offsets.device}, tables on {state.owner.device}")
