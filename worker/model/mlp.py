"""Layer kind: a dense gated SiLU MLP."""

import torch
from torch.nn import functional

from worker.model.batch import Batch
from worker.model.stack import Weights


class DenseMlp:
    """[T, H] -> [T, H]: down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._gate_up = torch.cat([weights.pop(f"{prefix}.gate"), weights.pop(f"{prefix}.up")])
        self._down = weights.pop(f"{prefix}.down")

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        gate, up = functional.linear(x, self._gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self._down)
