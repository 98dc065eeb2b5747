"""Root-mean-square normalisation."""

import torch

from kernels.norm import ref


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, as Qwen3 does it.

    `x` is [..., D], `weight` [D]; the normalisation is computed in float32, rounded to x's type, then scaled.
    ValueError if the last dimensions differ.
    """
    if weight.ndim != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit the last dimension of x {tuple(x.shape)}")
    return ref.rms_norm(x, weight, eps)
