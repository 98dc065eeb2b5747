"""Streaming on the device: what passes by the resident experts, and what it refuses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.admit.device import MAX_PAIRS, DeviceAdmission
from kernels.admit.state import ABSENT, AdmissionState

STREAM_STATS = ("hits", "misses")


@dataclass(frozen=True)
class DeviceStream:
    """Groups of stream slots, used in turn, and the tables by which a GEMM finds a part's experts; on one device.

    A layer's experts are cut by number into parts of `group_slots`: part p has the experts `spans[p, 0]` up to
    `spans[p, 1]`. Turn t's stream slots begin at first_slot + t * group_slots, one for each expert of the part that is
    in it, resident or not, so that neighbouring absent experts have neighbouring slots.
    """

    tables: Tensor  # [groups, E] int32, by turn: the slot of each expert of the part, ABSENT for the others
    spans: Tensor  # [parts, 2] int32
    stats: Tensor  # [L, 2] int64: see STREAM_STATS
    flags: Tensor  # [groups] int32, by turn, as DeviceAdmission's
    first_flag: int  # what the reader of the ring calls flags[0]
    first_slot: int
    group_slots: int

    @property
    def parts(self) -> int:
        """Parts of a layer."""
        return self.spans.shape[0]

    @property
    def groups(self) -> int:
        """Turns there are."""
        return self.tables.shape[0]


def new_device_stream(
    state: AdmissionState,
    admission: DeviceAdmission,
    flags: Tensor,
    first_flag: int,
    first_slot: int,
    group_slots: int,
    groups: int,
) -> DeviceStream:
    """`groups` groups of `group_slots` stream slots behind the S slots of `state`, rung through `admission`'s ring.

    `flags` [groups] int32. ValueError for groups that a record cannot hold, slots that are not behind S, or flags that
    do not fit or are admission's.
    """
    if not (1 <= group_slots <= MAX_PAIRS and groups >= 1):
        raise ValueError(
            f"{groups} groups of {group_slots} slots: at least 1, and at most {MAX_PAIRS} slots, are possible"
        )
    if first_slot < state.slots:
        raise ValueError(f"stream slots from {first_slot} on: the first {state.slots} are the residents'")
    if flags.dtype != torch.int32 or flags.shape != (groups,) or not flags.is_contiguous():
        raise ValueError(f"flags must be contiguous [{groups}] int32, not {flags.dtype} {tuple(flags.shape)}")
    device, experts = state.owner.device, state.experts
    if flags.device != device:
        raise ValueError(f"flags on {flags.device}, tables on {device}")
    own = range(admission.first_flag, admission.first_flag + admission.flags.shape[0])
    if first_flag < own.stop and first_flag + groups > own.start:
        raise ValueError(f"{groups} flags from {first_flag} on: {own.start} to {own.stop - 1} are admission's")
    begins = torch.arange(0, experts, group_slots, dtype=torch.int32)
    return DeviceStream(
        tables=torch.full((groups, experts), ABSENT, dtype=torch.int32, device=device),
        spans=torch.stack([begins, (begins + group_slots).clamp(max=experts)], 1).to(device),
        stats=torch.zeros(state.layers, len(STREAM_STATS), dtype=torch.int64, device=device),
        flags=flags,
        first_flag=first_flag,
        first_slot=first_slot,
        group_slots=group_slots,
    )


def check_part(state: AdmissionState, stream: DeviceStream, layer: int, part: int, turn: int) -> None:
    """ValueError for a layer, part or turn that there is not."""
    for name, number, count in (
        ("layer", layer, state.slot_of.shape[0]),
        ("part", part, stream.parts),
        ("turn", turn, stream.groups),
    ):
        if not 0 <= number < count:
            raise ValueError(f"{name} {number} of {count}")
