"""Root-mean-square normalisation."""

import torch

from kernels.norm import ref

MAX_WIDTH_ON_DEVICE = 16384


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, as Qwen3 does it.

    `x` is [..., D], `weight` [D]; the normalisation is computed in float32, rounded to x's type, then scaled. On a CUDA
    device it is one launch, also for rows that are a view of something wider, and D ends at 16,384.
    ValueError if the last dimensions differ, or for a D beyond that.
    """
    if weight.ndim != 1 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit the last dimension of x {tuple(x.shape)}")
    if not x.is_cuda:
        return ref.rms_norm(x, weight, eps)
    if x.shape[-1] > MAX_WIDTH_ON_DEVICE:
        raise ValueError(f"rows can have {MAX_WIDTH_ON_DEVICE} elements at most on a device, not {x.shape[-1]}")
    from kernels.norm import tri

    return tri.rms_norm(x, weight, eps)
