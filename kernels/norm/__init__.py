"""Root-mean-square normalisation."""

import torch

from kernels.norm import ref

MAX_WIDTH_ON_DEVICE = 16384
"""H: one program holds a row in registers."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False) -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, as Qwen3 does it.

    `x` is [..., D], `weight` [D]; the normalisation is computed in float32, rounded to x's type, then scaled. With
    `zero_centred` it is scaled by 1 + weight, in float32 and before it is rounded, as Qwen3-Next does it. On a CUDA
    device it is one launch, also for rows that are a view of something wider, and D ends at 16,384.
    ValueError if the last dimensions differ, or for a D beyond that.
    """
    if weight.ndim != 1 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit the last dimension of x {tuple(x.shape)}")
    if not x.is_cuda:
        return ref.rms_norm(x, weight, eps, zero_centred)
    if x.shape[-1] > MAX_WIDTH_ON_DEVICE:
        raise ValueError(f"rows can have {MAX_WIDTH_ON_DEVICE} elements at most on a device, not {x.shape[-1]}")
    from kernels.norm import tri

    return tri.rms_norm(x, weight, eps, zero_centred)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, fixed: bool = False
) -> torch.Tensor:
    """`rms_norm(x, weight, eps) * silu(gate)` as gated DeltaNet has it: the product in float32, rounded once.

    `x` and `gate` are [T, heads, D], views if need be, `weight` [D]; the result is of x's type. If it is `fixed`, a
    row's bits depend on that row alone, as on a CUDA device they always do, where it is one launch. ValueError for
    shapes that do not fit, or a D beyond 16,384 there.
    """
    if x.ndim != 3 or gate.shape != x.shape or tuple(weight.shape) != (x.shape[2],):
        raise ValueError(f"gate {tuple(gate.shape)} and weight {tuple(weight.shape)} do not fit x {tuple(x.shape)}")
    if not x.is_cuda:
        return ref.gated_rms_norm(x, gate, weight, eps, fixed)
    if x.shape[-1] > MAX_WIDTH_ON_DEVICE:
        raise ValueError(f"rows can have {MAX_WIDTH_ON_DEVICE} elements at most on a device, not {x.shape[-1]}")
    from kernels.norm import tri_gated

    return tri_gated.gated_rms_norm(x, gate, weight, eps)
