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

from copyengine.checkpoint.parallel import run_all
from copyengine.checkpoint.reader import NUMPY_DTYPE, OnBytes
from kernels.formats import Field, RecordLayout

CONSTANT = 0
"""The coordinate of the residual that holds the same value for every token and in every layer."""

E2M1_RMS = math.sqrt((0.5**2 + 1 + 1.5**2 + 2**2 + 3**2 + 4**2 + 6**2) / 8)
"""Of the sixteen codes, each as often as the others."""

SCALE_CODES = range(0x30, 0x40)
"""E4M3 codes of the block scales: 0.5 to 1.875."""

SCALE_RMS = math.sqrt(sum((half * (1 + m / 8)) ** 2 for half in (0.5, 1.0) for m in range(8)) / len(SCALE_CODES))

GLOBAL_SPREAD = 0.25
"""A global is up to this share above or below its mean, so that no two experts or projections share one."""

PIECE_NBYTES = 32 << 20
MAX_THREADS = 16

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
            if field.name == "down":
                target.reshape(field.shape[0], -1)[CONSTANT] = 0  # [H, I] in bytes; zero in every format
        on_bytes(bank.shape[1])


def _copy(source: Bank, target: Bank, experts: range, on_bytes: OnBytes) -> None:
    rows = slice(experts.start, experts.stop)
    np.copyto(target[rows], source[rows])
    on_bytes(len(experts) * source.shape[1])


def _draw_of(field: Field, layout: RecordLayout) -> Draw:
    """How the bytes of `field` are drawn."""
    std = (layout.intermediate if field.name.startswith("down") else layout.hidden) ** -0.5
    match field.dtype:
        case "uint8":
            return _codes
        case "float8_e4m3":
            return _scales
        case _ if layout.format == "nvfp4":
            return partial(_globals, std / (E2M1_RMS * SCALE_RMS))
        case dtype:
            return partial(_normal, _quantiles(std, dtype))


def _codes(generator: np.random.Generator, target: NDArray[np.uint8]) -> None:
    target[:] = _random_bytes(generator, target.size)


def _scales(generator: np.random.Generator, target: NDArray[np.uint8]) -> None:
    target[:] = _random_bytes(generator, target.size) % len(SCALE_CODES) + SCALE_CODES.start


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
    values = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)]).astype(NUMPY_DTYPE[dtype])
    return values.view(f"u{values.itemsize}")
