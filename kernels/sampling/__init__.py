"""Drawing the next token of each row."""

from typing import NamedTuple

import torch

from kernels.sampling import ref
from kernels.sampling.change import (
    FORBIDDEN,
    MAX_TEMPERATURE,
    AllowedTokens,
    LogitChanges,
    changed,
    only_allowed,
    restricted,
)
from kernels.sampling.logprobs import RowLogprobs, logprobs

__all__ = [
    "FORBIDDEN",
    "MAX_TEMPERATURE",
    "AllowedTokens",
    "LogitChanges",
    "RowLogprobs",
    "RowSampling",
    "changed",
    "logprobs",
    "only_allowed",
    "restricted",
    "sample",
]

MAX_VOCAB_ON_DEVICE = 2**20
"""V: what ranks and bands are counted in."""


class RowSampling(NamedTuple):
    """How each of B rows is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: torch.Tensor  # [B] float64
    top_k: torch.Tensor  # [B] int64
    top_p: torch.Tensor  # [B] float64
    min_p: torch.Tensor  # [B] float64, of the largest probability after temperature
    seed: torch.Tensor  # [B] int64
    position: torch.Tensor  # [B] int64, of the token to draw


def sample(logits: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Draws one token per row: temperature, then top_k and min_p, then top_p, then one draw by inverse CDF, in float64.

    `logits` is [B, V], floating; returns [B] int64: -1 for a row with NaN or infinity, which have no order to draw by.
    Greedy rows take the largest logit, ties the lowest id. Equal logits at the edge of top_k or top_p keep the lower
    ids; top_p keeps the smallest set whose mass reaches it, at least one token. A row's token depends on its logits and
    its own settings only: the draw is a hash of its seed and position (`ref.uniform`).

    On a CUDA device it is four launches, of the same shapes whatever the settings, which are not checked; logits are
    not float64 there, and V ends at 1,048,576. ValueError for shapes, types or settings out of range.
    """
    if logits.ndim != 2 or not logits.is_floating_point() or logits.shape[1] < 1:
        raise ValueError(f"logits must be a floating [B, V] tensor, not {logits.dtype} {tuple(logits.shape)}")
    for name, values in rows._asdict().items():
        expected = torch.float64 if name in ("temperature", "top_p", "min_p") else torch.int64
        if tuple(values.shape) != (logits.shape[0],) or values.dtype != expected:
            raise ValueError(f"{name} must be {expected} [{logits.shape[0]}], not {values.dtype} {list(values.shape)}")
    if logits.is_cuda:
        if logits.dtype == torch.float64 or logits.shape[1] > MAX_VOCAB_ON_DEVICE:
            raise ValueError(f"a device takes no {logits.dtype} [B, {logits.shape[1]}]")
        from kernels.sampling import tri

        return tri.sample(logits, *rows)
    if not bool((torch.isfinite(rows.temperature) & (rows.temperature >= 0)).all()):
        raise ValueError("temperature must be finite and not negative")
    if not bool(((rows.top_p > 0) & (rows.top_p <= 1) & (rows.top_k >= 0)).all()):
        raise ValueError("top_p must be in (0, 1] and top_k not negative")
    if not bool(((rows.min_p >= 0) & (rows.min_p <= 1)).all()):
        raise ValueError("min_p must be in [0, 1]")
    return ref.sample(logits, *rows[:4], ref.uniform(rows.seed, rows.position))
