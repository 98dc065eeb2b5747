"""Layer kind: a routed mixture of experts whose weights come and go in the slot pool."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from copyengine.model_spec import MoeSpec
from kernels.formats import RecordLayout
from kernels.grouped_gemm import combine, grouped_gemm
from kernels.moe_align import moe_align
from kernels.topk_route import topk_route
from worker.model.batch import Batch
from worker.model.stack import Weights


class Group(Protocol):
    """Experts that are in slots now: `experts[i]` is in slot `slots[i]`."""

    @property
    def experts(self) -> Sequence[int]: ...

    @property
    def slots(self) -> Sequence[int]: ...


class ExpertGroups(Protocol):
    """Brings experts into slots, group by group."""

    def groups(self, layer: int, experts: list[int]) -> Iterator[Group]:
        """Groups that cover `experts` (distinct, ascending) of bank `layer` once each.

        A group's slots hold its experts until the next group is asked for.
        """
        ...


@dataclass(frozen=True)
class ExpertPool:
    """Where the experts of all MoE layers are found."""

    source: ExpertGroups
    pool: torch.Tensor  # [pool_slots, record_nbytes] uint8
    layout: RecordLayout


class MoeFfn:
    """[T, H] -> [T, H]: the weighted sum of each token's K experts."""

    def __init__(self, spec: MoeSpec, weights: Weights, prefix: str, bank: int, experts: ExpertPool) -> None:
        self._spec = spec
        self._router = weights.pop(f"{prefix}.router")
        self._bank = bank
        self._experts = experts

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits = functional.linear(x, self._router)
        weights, experts = topk_route(logits, self._spec.experts_per_token, self._spec.norm_topk_prob)
        alignment = moe_align(experts, self._spec.experts)
        routed_to = alignment.offsets.diff().nonzero().flatten().tolist()
        rows = x.new_empty(experts.numel(), x.shape[1])
        for group in self._experts.source.groups(self._bank, routed_to):
            grouped_gemm(
                x, weights, alignment, self._experts.pool, self._experts.layout, group.experts, group.slots, rows
            )
        return combine(rows, x.shape[0])
