"""Plain torch."""

import torch

from kernels.norm import ref as norm


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    q = q if q_weight is None else norm.rms_norm(q, q_weight, eps)
    k = k if k_weight is None else norm.rms_norm(k, k_weight, eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)
