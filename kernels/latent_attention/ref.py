"""Plain torch: the latents are gathered from their pages and widened to float32; scores are held block by block."""

from collections.abc import Callable

import torch

from kernels.attention.ref import by_head

BLOCK_PAIRS = 512
"""Pairs of row and head that are scored at once, so that scores stay [512, length] however long the chunk is."""


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    scale: float,
) -> torch.Tensor:
    rows, heads, rank = q.shape
    out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
    latents = _in_order(latent_pages, pages, start + rows)
    keys = torch.cat([latents, _in_order(rope_pages, pages, start + rows)], dim=1)
    step = max(1, BLOCK_PAIRS // heads)
    for first in range(0, rows, step):
        block = slice(first, min(first + step, rows))
        count, length = block.stop - first, start + block.stop
        wide = torch.cat([q[block], q_rope[block]], dim=2).to(torch.float32).flatten(0, 1)
        scores = (scale * (wide @ keys[:length].T)).view(count, heads, length)
        hidden = torch.ones(count, length, dtype=torch.bool, device=q.device).triu(start + first + 1)
        weights = torch.softmax(scores.masked_fill_(hidden[:, None], float("-inf")), dim=-1)
        out[block] = (weights.flatten(0, 1) @ latents[:length]).view(count, heads, rank).to(q.dtype)
    return out


def decode_latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    attend: Callable[..., torch.Tensor] = latent_attention,
) -> torch.Tensor:
    """Row by row, as `attend` has a chunk of one."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        if length:
            one, pages = slice(row, row + 1), table[row].to(torch.int64)
            out[one] = attend(q[one], q_rope[one], latent_pages, rope_pages, pages, length - 1, scale)
    return out


def store_latent(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    latent_pages[pages, offsets] = latent
    rope_pages[pages, offsets] = rope_key


def _in_order(pages_of_all: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """[length, width] float32 of the positions 0 .. length - 1."""
    return by_head(pages_of_all, pages, 0, length)[0].to(torch.float32)
