"""Changes of single logits before the draw: bias, penalties, and tokens that may not be drawn.

Plain torch; nothing in it waits for the device.
"""

from typing import NamedTuple

import torch

FORBIDDEN = torch.finfo(torch.float32).min
"""The logit of a token that may not be drawn. It stands for minus infinity, which `sample` takes for a fault of the
model: at a temperature up to MAX_TEMPERATURE it has no mass in float64."""
MAX_TEMPERATURE = 1e35
"""Temperatures from here on draw the same: logits, of less than 1e18, have the same mass to the last bit."""


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


class AllowedTokens(NamedTuple):
    """Of G rows, each named once, the tokens that may be drawn; of the other rows all may.

    Token t of row `row[g]` may be drawn if bit t % 32 of `words[g, t // 32]` is set, and not if there is no such word.
    """

    row: torch.Tensor  # [G] int64
    words: torch.Tensor  # [G, W] int32, W > 0 if G is


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


def restricted(logits: torch.Tensor, allowed: AllowedTokens) -> torch.Tensor:
    """The logits [B, V] float32 with FORBIDDEN at all tokens that are not allowed; those allowed keep their bits.

    No bias or penalty could bring minus infinity back, so that this may come after `changed` as well as before it.
    """
    vocab, reached = logits.shape[1], 32 * allowed.words.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    may = torch.zeros(len(allowed.row), vocab, dtype=torch.bool, device=logits.device)
    may[:, :reached] = ((allowed.words[:, :, None] >> bits) & 1).flatten(1)[:, :vocab].to(torch.bool)
    return logits.index_copy(0, allowed.row, torch.where(may, logits[allowed.row], FORBIDDEN))


def only_allowed(tokens: torch.Tensor, allowed: AllowedTokens) -> torch.Tensor:
    """The tokens [B] int64 that were drawn from `restricted` logits, with -1 for one that is not allowed: a row of
    which nothing is allowed has no other."""
    drawn = tokens[allowed.row]
    word = (drawn.clamp(min=0) // 32)[:, None]
    last = allowed.words.shape[1] - 1
    bits = allowed.words.gather(1, word.clamp(max=last))[:, 0] >> (drawn % 32).to(torch.int32)
    may = (bits & 1).to(torch.bool) & (word[:, 0] <= last)
    return tokens.index_copy(0, allowed.row, torch.where(may, drawn, -1))
