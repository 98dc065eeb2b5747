"""Log-probabilities of drawn tokens and of the likeliest ones. Plain torch; nothing in it waits for the device."""

from typing import NamedTuple

import torch

MAX_VOCAB = 2**31
"""V: token ids are int32."""

FIXED_PART = 4096
"""Logits that are summed at a time where the order of sums is fixed."""


class RowLogprobs(NamedTuple):
    """Of B rows. Without meaning for a row whose logits are not finite."""

    drawn: torch.Tensor  # [B] float64
    ids: torch.Tensor  # [B, N] int64 the likeliest first, of equal ones the lowest id
    top: torch.Tensor  # [B, N] float64 of `ids`


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int, fixed: bool = False) -> RowLogprobs:
    """Natural log-softmax in float64 at `tokens` [B] int64, where -1 stands for no token, and at the `count` likeliest.

    `logits` is [B, V] of float32 or fewer bits; N is `count`, or V if that is less. If it is `fixed`, a row's bits
    depend on that row alone, not on B and not on the number of threads. ValueError for other types.
    """
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits must be of float32 or fewer bits, not {logits.dtype}")
    whole = _fixed_logsumexp(logits) if fixed else torch.logsumexp(logits.to(torch.float64), dim=1, keepdim=True)
    ids = torch.topk(_order(logits), min(count, logits.shape[1]), dim=1).indices
    top = logits.gather(1, ids).to(torch.float64) - whole
    drawn = logits.gather(1, tokens.clamp(min=0)[:, None]).to(torch.float64) - whole
    return RowLogprobs(drawn[:, 0], ids, top)


def _fixed_logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """[B, 1] float64, row by row: in parts, whose sums one thread computes each."""
    parts = -(-logits.shape[1] // FIXED_PART)
    rows = []
    for row in logits:
        largest = row.max().to(torch.float64)
        below = row.new_full((parts * FIXED_PART,), float("-inf"), dtype=torch.float64)
        below[: row.shape[0]] = row.to(torch.float64) - largest
        rows.append(below.exp().view(parts, FIXED_PART).sum(dim=1).sum().log() + largest)
    return torch.stack(rows)[:, None] if rows else logits.new_empty(0, 1, dtype=torch.float64)


def _order(logits: torch.Tensor) -> torch.Tensor:
    """[B, V] int64, all different: larger for a larger logit, of equal ones for the lower id. topk alone leaves open
    which of equal ones it takes, and with bfloat16 weights there are many."""
    bits = (logits.to(torch.float32) + 0.0).view(torch.int32).to(torch.int64)  # adding 0 makes the two zeros one
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return key * MAX_VOCAB - ids
