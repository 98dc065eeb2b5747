"""Plain torch: latent attention of kernels.online_softmax, for a chunk's rows and a decode step's alike."""

from functools import partial

import torch

from kernels.attention.fixed_ref import in_order
from kernels.latent_attention import ref
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


decode_latent_attention = partial(ref.decode_latent_attention, attend=latent_attention)
