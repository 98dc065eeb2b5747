"""Plain torch: latent attention of kernels.online_softmax, for a chunk's rows and a decode step's alike."""

import torch

from kernels.attention.fixed_ref import in_order
from kernels.online_softmax import Rows, attended


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    scale: float,
) -> torch.Tensor:
    def block(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        latents = in_order(latent_pages, pages, first, end)
        return torch.cat([latents, in_order(rope_pages, pages, first, end)], dim=2), latents

    wide = torch.cat([q, q_rope], dim=2)[:, None]
    return attended(Rows(wide, start, scale), q.shape[2], block)[:, 0].to(q.dtype)


def decode_latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        if length:
            one, pages = slice(row, row + 1), table[row].to(torch.int64)
            out[one] = latent_attention(q[one], q_rope[one], latent_pages, rope_pages, pages, length - 1, scale)
    return out
