"""What admission knows: which slot holds which expert, and when each slot was last used."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.admit.lrfu import bumps

ABSENT = -1
"""In `slot_of`: the expert is in no slot. In `owner`: the slot holds no expert."""

FREE = -1
"""In `last_used`: the slot holds nothing, so that it is older than every used one."""


@dataclass(frozen=True)
class AdmissionState:
    """`slot_of` and `owner` are inverse to each other; the experts of all layers share the slots."""

    slot_of: Tensor  # [L, E] int32
    owner: Tensor  # [S] int32, layer * E + expert
    last_used: Tensor  # [S] int64, the clock at the last admission of its expert; with a scored policy, its stamp
    clock: Tensor  # [] int64, counts admitted queries
    bumps: Tensor  # of kernels.admit.lrfu; empty with the policy "lru"
    half_life: int = 0  # in ticks of the clock; 0 with the policy "lru"

    @property
    def layers(self) -> int:
        """L."""
        return self.slot_of.shape[0]

    @property
    def slots(self) -> int:
        """S."""
        return self.owner.shape[0]

    @property
    def experts(self) -> int:
        """E."""
        return self.slot_of.shape[1]


@dataclass(frozen=True)
class Cut:
    """The queries of one layer, in the order of their admission."""

    queries: list[Tensor]  # each [n] int64, distinct, ascending
    at_once: bool  # all of them may be admitted before the first one's GEMM is done


def new_state(
    layers: int, experts: int, slots: int, device: torch.device | str = "cpu", half_life: int = 0
) -> AdmissionState:
    """An empty pool of S = `slots` slots for L = `layers` layers of E = `experts` experts.

    With a `half_life`, in admitted queries, the policy is kernels.admit.lrfu's. ValueError for one that it cannot have.
    """
    return AdmissionState(
        slot_of=torch.full((layers, experts), ABSENT, dtype=torch.int32, device=device),
        owner=torch.full((slots,), ABSENT, dtype=torch.int32, device=device),
        last_used=torch.full((slots,), FREE, dtype=torch.int64, device=device),
        clock=torch.zeros((), dtype=torch.int64, device=device),
        bumps=bumps(half_life, device),
        half_life=half_life,
    )
