"""One MoE layer's rows while its experts come in: alignment once, then the GEMM over whatever is in slots."""

import torch

from kernels.formats import RecordLayout
from kernels.grouped_gemm import InputScales, arrange, block_rows, combine, grouped_gemm_slots
from kernels.moe_align import align_in_blocks


class LayerRows:
    """The T * K rows of a layer. Nothing here takes a value from the device."""

    def __init__(
        self,
        layout: RecordLayout,
        num_experts: int,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        input_scales: InputScales | None = None,
        fixed: bool = False,
    ) -> None:
        """`x` [T, H], `weights` [T, K] float32, `experts` [T, K] int32 of E = `num_experts`; `input_scales` the
        layer's, if its experts quantise their inputs; `fixed` if a row's bits are to depend on that row alone."""
        tokens, k = weights.shape
        self.routes = tokens * k
        rows = block_rows(tokens, k, num_experts, layout, x.device, fixed)
        alignment, self._blocks = align_in_blocks(experts, num_experts, rows)
        self.offsets = alignment.offsets  # [E + 1] int32
        self._x = arrange(x, layout, input_scales)
        self._weights = weights
        self._layout = layout
        self._input_scales = input_scales
        self._fixed = fixed
        self._num_experts = num_experts
        self._mid = x.new_empty(self.routes, layout.intermediate)
        self._rows = x.new_empty(self.routes, layout.hidden)

    def compute(self, pool: torch.Tensor, slot_of: torch.Tensor, span: torch.Tensor, max_routed: int) -> None:
        """The rows routed to the experts of `span` [2] that have a slot in `slot_of` [E], at most `max_routed`."""
        grouped_gemm_slots(
            self._x,
            self._weights,
            self._blocks,
            pool,
            self._layout,
            slot_of,
            span,
            min(max_routed, self._num_experts, self.routes),
            self._rows,
            arranged=True,
            mid=self._mid,
            input_scales=self._input_scales,
            fixed=self._fixed,
        )

    def combined(self) -> torch.Tensor:
        """[T, H]: the sum of each token's K rows."""
        return combine(self._rows, self._weights.shape[0])
