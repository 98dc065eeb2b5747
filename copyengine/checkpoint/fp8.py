"""FP8 quantiser: kernels.quant.quant_fp8_block, bit for bit, in numpy."""

import numpy as np
from numpy.typing import NDArray

from copyengine.checkpoint.nvfp4 import E4M3, E4M3_MAX


def quantise(weight: NDArray[np.generic], block: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes [N, K], the bytes of E4M3, and a scale for each `block` of rows and columns, [ceil, ceil].

    Of `weight` [N, K], finite, whose sizes need not be multiples of the block's.
    """
    rows, columns = weight.shape
    down, across = block
    codes = np.empty((rows, columns), np.uint8)
    scales = np.ones((-(-rows // down), -(-columns // across)), np.float32)
    firsts = np.arange(0, columns, across)
    for row in range(len(scales) if columns else 0):
        piece = slice(row * down, min((row + 1) * down, rows))
        values = weight[piece].astype(np.float32)
        largest = np.maximum.reduceat(np.abs(values).max(axis=0), firsts) / np.float32(E4M3_MAX)
        scales[row] = np.where(largest > 0, largest, np.float32(1))
        units = values / np.repeat(scales[row], min(across, columns))[:columns]
        codes[piece] = np.clip(units, -E4M3_MAX, E4M3_MAX).astype(E4M3).view(np.uint8)
    return codes, scales
