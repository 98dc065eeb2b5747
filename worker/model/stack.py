"""How a model is put together: an embedding, blocks one after the other, a final norm and a head.

A block takes the residual and gives the next one. What a residual is, is between the blocks of a family: the stack
does not look at it, and a layer may be any number of blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.norm import rms_norm
from worker.model.batch import Batch
from worker.model.operations import Operations

Weights = dict[str, torch.Tensor]
"""Dense weights by canonical name. A layer takes what it needs out, so that what is left over shows."""

Block = Callable[[torch.Tensor, Batch], torch.Tensor]


@dataclass(frozen=True)
class Norm:
    """RMS norm with its weight [H]."""

    weight: torch.Tensor
    eps: float
    zero_centred: bool = False  # scales by 1 + weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centred)


@dataclass(frozen=True)
class PreNormResidual:
    """x + layer(norm(x)), x being [T, H]."""

    norm: Norm
    layer: Block

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x + self.layer(self.norm(x), batch)


class Decoder:
    """A causal language model."""

    def __init__(
        self, embed: torch.Tensor, blocks: Sequence[Block], norm: Norm, head: torch.Tensor, operations: Operations
    ) -> None:
        """`operations` are those that the blocks were made with."""
        self.operations = operations
        self._embed = embed
        self._blocks = blocks
        self._norm = norm
        self._vocab_size = head.shape[0]
        self._head = operations.linear(head)

    def hidden(self, batch: Batch) -> torch.Tensor:
        """The final hidden states of all rows, normalised: [T, H]."""
        x = functional.embedding(batch.tokens, self._embed)
        for block in self._blocks:
            x = block(x, batch)
        return self._norm(x)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._vocab_size

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V] float32 of rows of hidden states [R, H]; in `out` if that is given."""
        product = self._head(hidden)
        return product.to(torch.float32) if out is None else out.copy_(product)
