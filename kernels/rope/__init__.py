"""Rotary position embedding, NEOX style: the first half of a head is rotated against the second."""

import torch

from kernels.rope import ref


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each pair (x[i], x[i + D/2]) by its angle, in float32.

    `x` is [T, heads, D], `cos` and `sin` are [T, D/2] float32; returns [T, heads, D] like x. ValueError for shapes or
    types that do not fit together.
    """
    if x.ndim != 3 or cos.shape != sin.shape or tuple(cos.shape) != (x.shape[0], x.shape[2] // 2) or x.shape[2] % 2:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit x {tuple(x.shape)}")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(f"cos and sin must be float32, not {cos.dtype} and {sin.dtype}")
    return ref.apply_rope(x, cos, sin)
