"""What one step computes: the rows of all its sequences, one after the other, and where their keys and values go."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from kernels.state_pieces import Pieces

T = TypeVar("T")


@dataclass(frozen=True)
class Span:
    """One sequence's rows of the step: `rows` rows from row `first`, at positions `start` and up."""

    first: int
    rows: int
    start: int
    pages: torch.Tensor  # [P] int64, the KV pages of positions 0 .. start + rows - 1


@dataclass(frozen=True)
class PageTable:
    """The KV pages of B sequences of one row each, on the device, so that a launch need not know their lengths."""

    pages: torch.Tensor  # [B, P] int32, in order; those past the length are not read
    lengths: torch.Tensor  # [B] int32, positions up to and with the new one


@dataclass(frozen=True)
class StateRows:
    """State slots of B sequences of one row each: where each goes on from, -1 for zeros, and where its state goes."""

    sources: torch.Tensor  # [B] int32
    targets: torch.Tensor  # [B] int32


@dataclass(frozen=True)
class Batch:
    """T rows. The same for every layer; a layer kind reads what it needs."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    kv_pages: torch.Tensor  # [T] int64, the page that row t's keys and values go to
    kv_offsets: torch.Tensor  # [T] int64, its place in that page
    spans: tuple[Span, ...]  # empty if there is a page table
    table: PageTable | None = None  # of a decode step on a device
    states: StateRows | Pieces | None = None  # of a decode step, or of a prefill step; None for models without
    _made: dict[Hashable, Any] = field(default_factory=dict, compare=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make()` returns, which is called by the first layer that asks for `key` alone."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made
