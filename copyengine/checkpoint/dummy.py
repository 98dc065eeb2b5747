"""Expert records that are made up: valid ones of every format, for engines without weight files (--load-format dummy).

One layer is drawn, the other layers are copies of it. Matrices have elements of about 1/sqrt(fan-in), so that
activations keep their size through the layers. No expert writes residual coordinate CONSTANT, on which the made-up
routers' popularity of experts rests (worker/dummy.py).
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from copyengine.checkpoint.convert import NUMPY_DTYPE
from copyengine.checkpoint.nvfp4 import E4M3
from copyengine.checkpoint.parallel import run_all
from copyengine.checkpoint.reader import OnBytes
from kernels.formats import Field, RecordLayout

CONSTANT = 0
"""The coordinate of the residual that holds the same value for every token and in every layer."""

E2M1_RMS = math.sqrt((0.5**2 + 1 + 1.5**2 + 2**2 + 3**2 + 4**2 + 6**2) / 8)
"""Of the sixteen codes, each as often as the others."""

E4M3_STD = 16.0
"""Of E4M3 codes that are weights: what is drawn stays below their largest value, 448."""

SCALE_CODES = range(0x30, 0x40)
"""E4M3 codes of the block scales: 0.5 to 1.875."""

SCALE_RMS = math.sqrt(sum((half * (1 + m / 8)) ** 2 for half in (0.5, 1.0) for m in range(8)) / len(SCALE_CODES))

GLOBAL_SPREAD = 0.25
"""A global is up to this share above or below its mean, so that no two experts or projections share one."""

BIAS_STD = 0.1

PIECE_NBYTES = 32 << 20
"""Bytes that one thread makes up at a time: enough that handing them out costs nothing, so few that a load can be
stopped and shows progress."""

MAX_THREADS = 16
"""Threads that make weights up, where there are as many cores."""

Bank = NDArray[np.uint8]
Draw = Callable[[np.random.Generator, NDArray[np.uint8]], None]


def fill_dummy_experts(layout: RecordLayout, banks: Sequence[Bank], seed: int, on_bytes: OnBytes) -> None:
    """Fill `banks[l]` ([E, record_nbytes] uint8, contiguous) with experts that are determined by `seed` alone.

    `on_bytes` hears of the bytes filled, piece by piece and from several threads; what it raises ends the work.
    Bytes between the fields of a record are left as they are in the first bank.
    """
    if not banks:
        return
    draws = [(field, _draw_of(field, layout)) for field in layout.fields]
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    pieces = _pieces(*banks[0].shape)
    run_all([partial(_draw, banks[0], piece, draws, seed, on_bytes) for piece in pieces], threads, "dummy-experts")
    copies = [partial(_copy, banks[0], bank, piece, on_bytes) for bank in banks[1:] for piece in pieces]
    run_all(copies, threads, "dummy-experts")


def _pieces(experts: int, record_nbytes: int) -> list[range]:
    """Experts in runs of about PIECE_NBYTES."""
    step = max(1, PIECE_NBYTES // record_nbytes)
    return [range(first, min(first + step, experts)) for first in range(0, experts, step)]


def _draw(bank: Bank, experts: range, draws: Sequence[tuple[Field, Draw]], seed: int, on_bytes: OnBytes) -> None:
    for expert in experts:
        generator = np.random.Generator(np.random.SFC64([seed, expert]))
        for field, draw in draws:
            target = bank[expert, field.offset : field.offset + field.nbytes]
            draw(generator, target)
            if field.name in ("down", "down_bias"):
                target.reshape(field.shape[0], -1)[CONSTANT] = 0  # [H, ...] in bytes; zero in every format
        on_bytes(bank.shape[1])


def _copy(source: Bank, target: Bank, experts: range, on_bytes: OnBytes) -> None:
    rows = slice(experts.start, experts.stop)
    np.copyto(target[rows], source[rows])
    on_bytes(len(experts) * source.shape[1])


def _draw_of(field: Field, layout: RecordLayout) -> Draw:
    """How the bytes of `field` are drawn."""
    std = (layout.intermediate if field.name.startswith("down") else layout.hidden) ** -0.5
    if field.name.endswith("_bias"):
        return partial(_normal, _quantiles(BIAS_STD, field.dtype))
    match layout.format, field.name.removeprefix("gate_up").removeprefix("down"):
        case "nvfp4" | "mxfp4", "":
            return _codes
        case "nvfp4", "_scale":
            return _scales
        case "nvfp4", _:
            return partial(_globals, std / (E2M1_RMS * SCALE_RMS))
        case "mxfp4", _:
            return partial(_powers, std / E2M1_RMS)
        case "fp8_block" | "fp8_tensor", "":
            return partial(_normal, _quantiles(E4M3_STD, field.dtype))
        case "fp8_block" | "fp8_tensor", _:
            return partial(_globals, std / E4M3_STD)
    return partial(_normal, _quantiles(std, field.dtype))


def _codes(generator: np.random.Generator, target: NDArray[np.uint8]) -> None:
    target[:] = _random_bytes(generator, target.size)


def _scales(generator: np.random.Generator, target: NDArray[np.uint8]) -> None:
    target[:] = _random_bytes(generator, target.size) % len(SCALE_CODES) + SCALE_CODES.start


def _powers(rms: float, generator: np.random.Generator, target: NDArray[np.uint8]) -> None:
    """Biased exponents of two neighbouring powers of two, of which so many are the higher that all have that `rms`."""
    low = math.floor(math.log2(rms))
    share = ((rms / 2.0**low) ** 2 - 1) / 3
    target[:] = 127 + low + (_random_bytes(generator, target.size) < round(256 * share))


def _globals(mean: float, generator: np.random.Generator, target: NDArray[np.uint8]) -> None:
    spread = generator.uniform(1 - GLOBAL_SPREAD, 1 + GLOBAL_SPREAD, target.size // 4)
    target[:] = (mean * spread).astype("<f4").view(np.uint8)


def _normal(quantiles: NDArray[np.generic], generator: np.random.Generator, target: NDArray[np.uint8]) -> None:
    """A table instead of a normal generator: as fast for bfloat16, which numpy does not draw, as for float32."""
    values = target.view(quantiles.dtype)
    np.take(quantiles, _random_bytes(generator, 2 * values.size).view(np.uint16), out=values, mode="clip")


def _random_bytes(generator: np.random.Generator, nbytes: int) -> NDArray[np.uint8]:
    words = generator.integers(0, 2**64 - 1, -(-nbytes // 8), np.uint64, endpoint=True)
    return words.view(np.uint8)[:nbytes]


def _quantiles(std: float, dtype: str) -> NDArray[np.generic]:
    """[65536] equally likely values of a normal distribution, as unsigned integers with the bits of `dtype`."""
    normal = NormalDist(0.0, std)
    element = E4M3 if dtype == "float8_e4m3" else NUMPY_DTYPE[dtype]
    values = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)]).astype(element)
    return values.view(f"u{values.itemsize}")
