"""Quantised matrices of the formats of `kernels.formats`: made of floating ones, and their exact values."""

from typing import NamedTuple

import torch

from kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK
from kernels.quant import ref


class Nvfp4(NamedTuple):
    """One matrix [N, K] as w[n, k] = E2M1[code] * scale[n, k // 16] * global."""

    codes: torch.Tensor  # [N, K / 2] uint8, the even k in the low nibble
    scales: torch.Tensor  # [N, K / 16] float8_e4m3fn
    scale: torch.Tensor  # [] float32, the global


class Mxfp4(NamedTuple):
    """One matrix [N, K] as w[n, k] = E2M1[code] * 2^(scale[n, k // 32] - 127)."""

    codes: torch.Tensor  # [N, K / 2] uint8, the even k in the low nibble
    scales: torch.Tensor  # [N, K / 32] uint8; 255 is no number


class Fp8Block(NamedTuple):
    """One matrix [N, K] as w[n, k] = code * scale[n // rows, k // columns]."""

    codes: torch.Tensor  # [N, K] float8_e4m3fn
    scales: torch.Tensor  # [ceil(N / rows), ceil(K / columns)] float32
    block: tuple[int, int]  # rows, columns


class Fp8Tensor(NamedTuple):
    """One matrix [N, K] as w[n, k] = code * scale."""

    codes: torch.Tensor  # [N, K] float8_e4m3fn
    scale: torch.Tensor  # [] float32


Matrix = Nvfp4 | Mxfp4 | Fp8Block | Fp8Tensor


def quant(weight: torch.Tensor, scale: float | None = None) -> Nvfp4:
    """Quantises `weight` [N, K], floating, K a multiple of 16. `scale` is the global if it is given.

    Each block's scale is its largest magnitude / 6, rounded to E4M3 in units of the global, and each code is the
    nearest value, ties to the even code. Without `scale` the global makes the largest block's scale 448. ValueError
    for a wrong shape or type.
    """
    _expect_blocks(weight, NVFP4_BLOCK)
    return Nvfp4(*ref.quant(weight, scale))


def quant_mxfp4(weight: torch.Tensor) -> Mxfp4:
    """Quantises `weight` [N, K], floating and finite, K a multiple of 32.

    Each block's scale is the least power of two, 2^-127 to 2^127, under which its largest magnitude is at most 6, and
    each code is the nearest value, ties to the even code. ValueError for a wrong shape or type.
    """
    _expect_blocks(weight, MXFP4_BLOCK)
    return Mxfp4(*ref.quant_mxfp4(weight))


def quant_fp8_block(weight: torch.Tensor, block: tuple[int, int]) -> Fp8Block:
    """Quantises `weight` [N, K], floating and finite, in blocks of (rows, columns); those at the ends may be smaller.

    Each block's scale is its largest magnitude / 448 in float32, 1 where that is 0, and each code is E4M3(weight /
    scale), where the quotient is float32 and the rounding to nearest even. ValueError for a wrong shape or type.
    """
    _expect_blocks(weight, 1)
    if min(block) < 1:
        raise ValueError(f"block must be at least 1 x 1, not {block[0]} x {block[1]}")
    return Fp8Block(*ref.quant_fp8(weight, block), block)


def quant_fp8_tensor(weight: torch.Tensor) -> Fp8Tensor:
    """As `quant_fp8_block` with one block, which is all of `weight` [N, K]. ValueError for a wrong shape or type."""
    _expect_blocks(weight, 1)
    rows, columns = weight.shape
    codes, scales = ref.quant_fp8(weight, (max(rows, 1), max(columns, 1)))
    return Fp8Tensor(codes, scales.reshape(()) if scales.numel() else scales.new_ones(()))


def quantised_inputs(x: torch.Tensor, input_scale: float) -> torch.Tensor:
    """x [T, K] as W4A4 takes it, in units of `input_scale`: [T, K] like x, E2M1[code] * scale[t, k // 16], exact.

    K is a multiple of 16. Each block's scale is its largest magnitude / 6 / input_scale, rounded to E4M3 and at most
    448, each code the nearest to x / (scale * input_scale), ties to the even code; all in float32, each operation
    rounded to nearest. A block with not-a-number in it is not a number. ValueError for a wrong shape or type.
    """
    _expect_blocks(x, NVFP4_BLOCK)
    return ref.quantised_inputs(x, input_scale)


def dequant(matrix: Matrix) -> torch.Tensor:
    """[N, K] float64, exact. ValueError if the shapes do not fit together."""
    match matrix:
        case Nvfp4(codes, scales, scale):
            _expect_scales(codes, scales, (codes.shape[0], codes.shape[1] // 8), codes.shape[1] % 8 == 0)
            return ref.dequant(codes, scales, scale)
        case Mxfp4(codes, scales):
            _expect_scales(codes, scales, (codes.shape[0], codes.shape[1] // 16), codes.shape[1] % 16 == 0)
            return ref.dequant_mxfp4(codes, scales)
        case Fp8Block(codes, scales, block):
            rows, columns = codes.shape
            _expect_scales(codes, scales, (-(-rows // block[0]), -(-columns // block[1])))
            return ref.dequant_fp8(codes, scales, block)
        case Fp8Tensor(codes, scale):
            _expect_scales(codes, scale, ())
            return codes.to(torch.float64) * scale.to(torch.float64)


def _expect_blocks(weight: torch.Tensor, block: int) -> None:
    if weight.ndim != 2 or not weight.is_floating_point() or weight.shape[1] % block:
        raise ValueError(
            f"weight must be floating [N, K], K a multiple of {block}, not {weight.dtype} {tuple(weight.shape)}"
        )


def _expect_scales(codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], whole: bool = True) -> None:
    if tuple(scales.shape) != shape or not whole:
        raise ValueError(f"scales {tuple(scales.shape)} do not fit codes {tuple(codes.shape)}")
