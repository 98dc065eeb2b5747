"""State slots: what recurrent layers keep of sequences. Which sequence owns which slot is the scheduler's business."""

import math
from typing import NamedTuple

import torch

from copyengine.model_spec import ModelSpec


class StateLayer(NamedTuple):
    """The states of one gated DeltaNet layer; views of all slots' memory, strided by slot."""

    conv: torch.Tensor  # [slots, W - 1, C] float32, the last rows before the convolution, oldest first
    recurrent: torch.Tensor  # [slots, Hv, Dk, Dv] float32


class StateSlots:
    """The states of all recurrent layers: those of one slot lie together, so that a copy is one run of bytes."""

    def __init__(self, spec: ModelSpec, count: int, device: torch.device) -> None:
        if count < 1 or not spec.state_nbytes:
            raise ValueError(f"{count} state slots of {spec.state_nbytes} bytes: there must be some of both")
        self.count = count
        self._slots = torch.zeros(count, spec.state_nbytes // 4, dtype=torch.float32, device=device)
        self.layers: dict[int, StateLayer] = {}
        first = 0
        for index, layer in enumerate(spec.layers):
            parts = []
            for shape in layer.attention.state_shapes:
                elements = math.prod(shape)
                parts.append(self._slots[:, first : first + elements].view(count, *shape))
                first += elements
            if parts:
                self.layers[index] = StateLayer(*parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._slots.nbytes

    def copy(self, source: int, target: int) -> None:
        """Slot `target` becomes what slot `source` is, in the order of the computing stream."""
        self._slots[target].copy_(self._slots[source])
