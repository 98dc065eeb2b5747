"""What a tensor of a quantised linear must be once it is read, and what becomes of it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from copyengine.checkpoint.nvfp4 import E4M3_MAX, FLOAT32_MAX, MAGNITUDES
from copyengine.checkpoint.schemes import Kind
from copyengine.wire.errors import ConfigError

E4M3_NAN = 0x7F
"""And 0xFF, its negative."""

E8M0_NAN = 0xFF
MOST_FACTOR = np.float32(FLOAT32_MAX / E4M3_MAX)
"""Under a larger scale the largest E4M3 code is beyond float32. Of weights that are numbers no quantiser makes one."""

MOST_GLOBAL = np.float32(FLOAT32_MAX / (E4M3_MAX * MAGNITUDES[-1]))
"""Likewise, of the largest E2M1 code under the largest scale."""

PIECE_NBYTES = 1 << 18
"""Looked at at a time, so that what is in between stays in the processor's cache."""


def finish(kind: Kind, data: NDArray[np.uint8], path: Path, source: str) -> None:
    """Turn the bytes of the tensor `source`, its element type that of its field already, into what the field holds.

    ConfigError, naming it, for what makes no number of a code.
    """
    match kind:
        case "e4m3" | "scales":
            _refuse_nan(data, E4M3_NAN, path, source)
        case "powers":
            _refuse_nan(data, E8M0_NAN, path, source)
        case "blocks" | "factor":
            scales = data.view(np.float32)
            if not ((scales >= 0) & (scales <= MOST_FACTOR)).all():
                raise ConfigError(
                    f"{path}: tensor {source} holds a scale that is below 0, not finite or too large for float32; "
                    "download it again"
                )
        case "global" | "reciprocal":
            _finish_global(kind, data.view(np.float32), path, source)


def _refuse_nan(data: NDArray[np.uint8], nan: int, path: Path, source: str) -> None:
    """No byte is 0xFF, nor `nan`.

    Scales are not below 0: one pass that looks for the largest byte, and takes no memory, does for them.
    """
    for low in range(0, data.size, PIECE_NBYTES):
        piece = data[low : low + PIECE_NBYTES]
        highest = piece.max()
        if highest == 0xFF or (highest >= nan and piece.view(np.int8).max() == nan):
            raise ConfigError(f"{path}: tensor {source} holds NaN; download it again")


def _finish_global(kind: Kind, value: NDArray[np.float32], path: Path, source: str) -> None:
    found = value.item()
    if kind == "global" and 0 < found <= MOST_GLOBAL:  # of 100,000 small tensors, so that the general case is too slow
        return
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if kind == "reciprocal":
            value[:] = np.float32(1) / value
    if not (np.isfinite(found) and 0 < value[0] <= MOST_GLOBAL):
        raise ConfigError(
            f"{path}: tensor {source} is {found:g}, which scales no weights: it must be above 0 and finite, as its "
            "reciprocal, and the largest weight under it within float32; download it again"
        )
