"""What one step computes: the rows of all its sequences, one after the other, and where their keys and values go."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    """One sequence's rows of the step: `rows` rows from row `first`, at positions `start` and up."""

    first: int
    rows: int
    start: int
    pages: torch.Tensor  # [P] int64, the KV pages of positions 0 .. start + rows - 1


@dataclass(frozen=True)
class Batch:
    """T rows. The same for every layer; a layer kind reads what it needs."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    kv_pages: torch.Tensor  # [T] int64, the page that row t's keys and values go to
    kv_offsets: torch.Tensor  # [T] int64, its place in that page
    spans: tuple[Span, ...]
