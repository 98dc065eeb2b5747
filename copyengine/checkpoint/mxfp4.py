"""MXFP4 quantiser: kernels.quant.quant_mxfp4, bit for bit, in numpy."""

import numpy as np
from numpy.typing import NDArray

from copyengine.checkpoint.nvfp4 import MAGNITUDES, PIECE_ELEMENTS, packed_codes
from kernels.formats import MXFP4_BLOCK

E8M0_BIAS = 127
E8M0_MAX = 254
"""The highest scale that is a number."""


def quantise(weight: NDArray[np.generic]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes [N, K / 2] and scales [N, K / 32] of `weight` [N, K], finite, K a multiple of 32."""
    rows, columns = weight.shape
    codes = np.empty((rows, columns // 2), np.uint8)
    scales = np.empty((rows, columns // MXFP4_BLOCK), np.uint8)
    step = max(1, PIECE_ELEMENTS // max(1, columns))
    for low in range(0, rows, step):
        blocks = weight[low : low + step].astype(np.float64)
        blocks = blocks.reshape(len(blocks), columns // MXFP4_BLOCK, MXFP4_BLOCK)
        fraction, exponent = np.frexp(np.abs(blocks).max(axis=2) / MAGNITUDES[-1])  # fraction in [0.5, 1), or 0
        power = np.where(fraction > 0.5, exponent, exponent - 1) + E8M0_BIAS
        power = np.where(fraction > 0, np.clip(power, 0, E8M0_MAX), 0)
        units = blocks / np.ldexp(1.0, power - E8M0_BIAS)[:, :, None]
        scales[low : low + step] = power
        codes[low : low + step] = packed_codes(units.reshape(len(units), columns))
    return codes, scales
