"""Plain torch."""

import torch

from kernels.norm import ref as norm


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    wide = x.to(torch.float32)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, wide[..., 2 * half :]), dim=-1).to(x.dtype)


def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    zero_centred: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    q = q if q_weight is None else norm.rms_norm(q, q_weight, eps, zero_centred)
    k = k if k_weight is None else norm.rms_norm(k, k_weight, eps, zero_centred)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)
