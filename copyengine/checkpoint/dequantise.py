"""The weights of quantised linears, in float32: a product of a code and its scales, rounded once."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copyengine.checkpoint.nvfp4 import E4M3, MAGNITUDES, PIECE_ELEMENTS
from copyengine.checkpoint.schemes import Kind
from kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK

_E2M1 = np.array([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], np.float32)
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)
"""[256, 2]: of a byte, the low nibble's value first."""

_E4M3 = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
_POWERS = np.ldexp(np.float32(1), np.arange(-127, 128))
"""Of the biased exponents that are numbers."""

Tensors = Mapping[Kind, NDArray[Any]]
"""A linear's: bytes of codes, scales and exponents, in their shapes; float32 for all else."""


def dequantised(tensors: Tensors, block: tuple[int, int]) -> Iterator[NDArray[np.float32]]:
    """The weight [N, K] in runs of rows. `block` as in Scheme.

    The code times E4M3 or E8M0 scales is exact in float32, so that the one rounding is that of the last product.
    """
    codes = tensors["codes" if "codes" in tensors else "e4m3"]
    step = max(1, PIECE_ELEMENTS // max(1, codes.shape[1]))
    for low in range(0, codes.shape[0], step):
        rows = np.arange(low, min(low + step, codes.shape[0]))
        with np.errstate(over="ignore"):  # the largest exponents' products are infinite in float64's rounding too
            scaled = _scaled(codes[rows[0] : rows[-1] + 1], rows, tensors, block)
        yield scaled


def _scaled(
    codes: NDArray[np.uint8], rows: NDArray[np.intp], tensors: Tensors, block: tuple[int, int]
) -> NDArray[np.float32]:
    if "e4m3" in tensors:
        values: NDArray[np.float32] = _E4M3[codes]
        if "blocks" in tensors:
            values *= _of_blocks(tensors["blocks"], rows, codes.shape[1], block)
        else:
            values *= tensors["factor"].reshape(())
        return values
    values = _PAIRS[codes].reshape(codes.shape[0], -1)
    if "powers" in tensors:
        return _times(values, _POWERS[tensors["powers"][rows]], MXFP4_BLOCK)
    exact = _times(values, _E4M3[tensors["scales"][rows]], NVFP4_BLOCK)
    factor = tensors["global" if "global" in tensors else "reciprocal"]
    exact *= factor.reshape(())
    return exact


def _times(values: NDArray[np.float32], scales: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Each run of `size` columns by its scale."""
    scaled: NDArray[np.float32] = values.reshape(*scales.shape, size) * scales[:, :, None]
    return scaled.reshape(values.shape)


def _of_blocks(
    scales: NDArray[np.float32], rows: NDArray[np.intp], columns: int, block: tuple[int, int]
) -> NDArray[np.float32]:
    """[len(rows), K]: each element's scale."""
    return np.repeat(scales[rows // block[0]], min(block[1], columns), axis=1)[:, :columns]
