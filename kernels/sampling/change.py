"""Changes of single logits before the draw: bias and penalties. Plain torch; nothing in it waits for the device."""

from typing import NamedTuple

import torch


class LogitChanges(NamedTuple):
    """Changes of B rows. A row names a token once among its N biases and once among its M seen tokens."""

    repetition: torch.Tensor  # [B] float64, 1 is off
    presence: torch.Tensor  # [B] float64, 0 is off
    frequency: torch.Tensor  # [B] float64, 0 is off
    bias_row: torch.Tensor  # [N] int64
    bias_token: torch.Tensor  # [N] int64
    bias: torch.Tensor  # [N] float64
    seen_row: torch.Tensor  # [M] int64
    seen_token: torch.Tensor  # [M] int64 of prompt and answer
    seen_count: torch.Tensor  # [M] int64 how often it was generated; 0: it is in the prompt alone


def changed(logits: torch.Tensor, changes: LogitChanges) -> torch.Tensor:
    """The logits [B, V] float32, of floating ones, with the changes made: what they name is computed in float64.

    First the bias is added. Then a seen token's logit is divided by the repetition penalty if it is positive, else
    multiplied by it (Keskar and others: CTRL, 2019), and less by frequency times its count, and by presence if its
    count is not 0 (OpenAI's API reference). All other logits keep their bits.
    """
    out = logits.to(torch.float32, copy=True)
    biased = (changes.bias_row, changes.bias_token)
    out[biased] = (out[biased].to(torch.float64) + changes.bias).to(torch.float32)
    seen = (changes.seen_row, changes.seen_token)
    values = out[seen].to(torch.float64)
    repetition = changes.repetition[changes.seen_row]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - changes.frequency[changes.seen_row] * changes.seen_count
    values = values - changes.presence[changes.seen_row] * (changes.seen_count > 0)
    out[seen] = values.to(torch.float32)
    return out
