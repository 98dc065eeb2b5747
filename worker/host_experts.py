"""A layer's experts on the host: group by group, as the slot pool makes them available."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from kernels.formats import RecordLayout
from kernels.grouped_gemm import InputScales, combine, fixed_rows, grouped_gemm
from kernels.moe_align import moe_align


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


class HostExperts:
    """See worker.model.moe.Experts. The host decides between router and GEMM, which on the host costs nothing."""

    def __init__(
        self,
        source: ExpertGroups,
        pool: torch.Tensor,
        layout: RecordLayout,
        experts: int,
        input_scales: Sequence[InputScales] = (),
        fixed_order_of: torch.dtype | None = None,
    ) -> None:
        """`pool` [pool_slots, record_nbytes] uint8 holds records of `layout`; E = `experts`; `input_scales` each
        bank's, if the layout's experts quantise their inputs; `fixed_order_of` the type of x if a row's bits are to
        depend on that row alone."""
        self._source = source
        self._pool = pool
        self._layout = layout
        self._num_experts = experts
        self._input_scales = input_scales
        self._fixed = fixed_rows(layout, fixed_order_of) if fixed_order_of else 0

    def __call__(self, layer: int, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See worker.model.moe.Experts. Raises as the source does."""
        alignment = moe_align(experts, self._num_experts)
        routed_to = alignment.offsets.diff().nonzero().flatten().tolist()
        rows = x.new_empty(experts.numel(), x.shape[1])
        scales = self._input_scales[layer] if self._input_scales else None
        kind = (self._pool, self._layout)
        for group in self._source.groups(layer, routed_to):
            grouped_gemm(x, weights, alignment, *kind, group.experts, group.slots, rows, scales, self._fixed)
        return combine(rows, x.shape[0])
