"""Layer kind: a dense gated SiLU MLP."""

import torch

from worker.model.batch import Batch
from worker.model.operations import Operations
from worker.model.stack import Weights


class DenseMlp:
    """[T, H] -> [T, H]: down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: Weights, prefix: str, operations: Operations) -> None:
        self._gate_up = operations.linear(torch.cat([weights.pop(f"{prefix}.gate"), weights.pop(f"{prefix}.up")]))
        self._down = operations.linear(weights.pop(f"{prefix}.down"))
        self._silu = operations.silu

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._silu(gate) * up)
