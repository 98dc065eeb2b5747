"""NVFP4: blocks of 16 E2M1 codes under an E4M3 scale, all under one float32 factor (its global)."""

from typing import NamedTuple

import torch

from kernels.formats import NVFP4_BLOCK
from kernels.quant import ref


class Nvfp4(NamedTuple):
    """One matrix [N, K] as w[n, k] = E2M1[code] * scale[n, k // 16] * global."""

    codes: torch.Tensor  # [N, K / 2] uint8, the even k in the low nibble
    scales: torch.Tensor  # [N, K / 16] float8_e4m3fn
    scale: torch.Tensor  # [] float32, the global


def quant(weight: torch.Tensor, scale: float | None = None) -> Nvfp4:
    """Quantises `weight` [N, K], floating, K a multiple of 16. `scale` is the global if it is given.

    Each block's scale is its largest magnitude / 6, rounded to E4M3 in units of the global, and each code is the
    nearest value, ties to the even code. Without `scale` the global makes the largest block's scale 448. ValueError
    for a wrong shape or type.
    """
    if weight.ndim != 2 or not weight.is_floating_point() or weight.shape[1] % NVFP4_BLOCK:
        raise ValueError(
            f"weight must be floating [N, K], K a multiple of 16, not {weight.dtype} {tuple(weight.shape)}"
        )
    return Nvfp4(*ref.quant(weight, scale))


def dequant(matrix: Nvfp4) -> torch.Tensor:
    """[N, K] float64, exact. ValueError if the shapes do not fit together."""
    rows, half = matrix.codes.shape
    if tuple(matrix.scales.shape) != (rows, half // 8) or half % 8:
        raise ValueError(f"scales {tuple(matrix.scales.shape)} do not fit codes {tuple(matrix.codes.shape)}")
    return ref.dequant(matrix.codes, matrix.scales, matrix.scale)
