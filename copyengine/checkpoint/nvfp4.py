"""The quantiser of kernels.quant, bit for bit, in numpy: what makes checkpoints loads no torch."""

from itertools import pairwise
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kernels.formats import NVFP4_BLOCK

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the E2M1 codes 0..7; bit 3 is the sign."""

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
"""The greatest number that the type can hold."""

FLOAT32_MAX = float(np.finfo(np.float32).max)

_HALFWAY = tuple((low + high) / 2 for low, high in pairwise(MAGNITUDES))

PIECE_ELEMENTS = 1 << 18
"""Quantised at a time, so that what is in between stays in the processor's cache."""


class Quantised(NamedTuple):
    """One matrix [N, K] as w[n, k] = E2M1[code] * scale[n, k // 16] * factor."""

    codes: NDArray[np.uint8]  # [N, K / 2], the even k in the low nibble
    scales: NDArray[np.generic]  # [N, K / 16] float8_e4m3fn
    factor: np.float32  # the global


def global_of(weight: NDArray[np.generic]) -> np.float32:
    """The global under which the largest block of `weight` gets the largest scale; 1 for a matrix of zeros, or of
    numbers so small that float32 holds no such global; not finite if an element is not."""
    top = float(np.max(np.abs(weight.astype(np.float32)), initial=0.0))
    factor = np.float32(top / (MAGNITUDES[-1] * E4M3_MAX))
    return factor if factor != 0 else np.float32(1)


def reciprocal(factor: np.float32) -> np.float32:
    """The float32 nearest to one over `factor`, which is above 0 and finite. One over it may be another factor."""
    return np.float32(min(1 / float(factor), FLOAT32_MAX))


def quantise(weight: NDArray[np.generic], factor: np.float32) -> Quantised:
    """Quantises `weight` [N, K], finite, K a multiple of 16, under the global `factor`: as kernels.quant.quant."""
    rows, columns = weight.shape
    codes = np.empty((rows, columns // 2), np.uint8)
    scales = np.empty((rows, columns // NVFP4_BLOCK), E4M3)
    step = max(1, PIECE_ELEMENTS // max(1, columns))
    for low in range(0, rows, step):
        piece = slice(low, low + step)
        codes[piece], scales[piece] = _quantise_rows(weight[piece].astype(np.float32), factor)
    return Quantised(codes, scales, factor)


def _quantise_rows(weight: NDArray[np.float32], factor: np.float32) -> tuple[NDArray[np.uint8], NDArray[np.generic]]:
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // NVFP4_BLOCK, NVFP4_BLOCK)
    with np.errstate(over="ignore", under="ignore"):
        largest = np.abs(blocks).max(axis=2) / np.float32(MAGNITUDES[-1]) / factor
    scales = np.minimum(largest, np.float32(E4M3_MAX)).astype(E4M3)
    steps = (scales.astype(np.float64) * np.float64(factor))[:, :, None]
    units = np.divide(blocks, steps, out=np.zeros(blocks.shape), where=steps > 0, dtype=np.float64)
    return packed_codes(units.reshape(rows, columns)), scales


def packed_codes(units: NDArray[np.float64]) -> NDArray[np.uint8]:
    """[N, K] -> [N, K / 2]: the nearest codes, the even k in the low nibble."""
    codes = _nearest_codes(units)
    high: NDArray[np.uint8] = np.left_shift(codes[:, 1::2], 4, dtype=np.uint8)
    return codes[:, 0::2] | high


def _nearest_codes(units: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The code of the nearest E2M1 value; halfway goes to the even code, that is down from an even one."""
    magnitude = np.abs(units)
    codes: NDArray[np.uint8] = np.left_shift(units < 0, 3, dtype=np.uint8)
    for code, halfway in enumerate(_HALFWAY):
        codes += (magnitude >= halfway) if code % 2 else (magnitude > halfway)
    return codes
