"""64 bits that say what an expert record holds, for --verify-copies. Pure.

The sum of a record is that of its 32-bit words, as signed numbers, each times an odd number of its place, modulo 2^64:
of word i, `within[i % BLOCK_WORDS] * blocks[i // BLOCK_WORDS]`, both odd and drawn at random once and for all
(multilinear hashing: Carter and Wegman, 1979). So one word that differs always shows; words that differ in any other
way, that are missing, old, or in the place of others, stay unseen in about one case of 2^32. It is no protection
against one who wants to deceive. kernels/checksum computes the same of slots on a GPU.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from copyengine.checkpoint.parallel import run_all

Sums = np.ndarray[Any, np.dtype[np.int64]]
Records = np.ndarray[tuple[int, int], np.dtype[np.uint8]]

BLOCK_WORDS = 1024
"""Words after which the numbers within a block come again. So the tables stay small, whatever a record takes."""

THREADS = 8
"""That sum at a time. One sums 4.2 GB/s (AMD EPYC, 2026-11), so that eight come near to what a host's memory gives."""

PIECE_NBYTES = 16 << 20
"""Of records that one thread sums at a time, at least one: often enough to tell of it."""


class Weights(NamedTuple):
    """What the words of a record are multiplied by."""

    within: Sums  # [BLOCK_WORDS]
    blocks: Sums  # [ceil(words / BLOCK_WORDS)]


def weights_of(record_nbytes: int) -> Weights:
    """Those of records of that many bytes, which are 4 times some."""
    numbers = _mixed(np.arange(BLOCK_WORDS + -(-record_nbytes // (4 * BLOCK_WORDS)), dtype=np.uint64))
    odd = (numbers | np.uint64(1)).view(np.int64)
    return Weights(odd[:BLOCK_WORDS], odd[BLOCK_WORDS:])


def sums_of(records: Records, weights: Weights) -> Sums:
    """[n] int64: of each of `records` [n, record_nbytes] uint8, whose rows are contiguous."""
    words = records.view(np.int32)
    whole = words.shape[1] // BLOCK_WORDS
    blocks = words[:, : whole * BLOCK_WORDS].reshape(len(words), whole, BLOCK_WORDS)
    sums: Sums = np.einsum("nbw,w->nb", blocks, weights.within) @ weights.blocks[:whole]
    rest = words[:, whole * BLOCK_WORDS :]
    if rest.shape[1]:
        sums += np.einsum("nw,w->n", rest, weights.within[: rest.shape[1]]) * weights.blocks[whole]
    return sums


def bank_sums(banks: Sequence[Records], on_bytes: Callable[[int], None]) -> Sums:
    """[L, E] int64 of L banks, [E, record_nbytes] each; `on_bytes` hears of the bytes from several threads, and may
    raise."""
    experts, record_nbytes = banks[0].shape
    weights = weights_of(record_nbytes)
    sums = np.empty((len(banks), experts), np.int64)

    def fill(layer: int, part: slice) -> None:
        records = banks[layer][part]
        sums[layer, part] = sums_of(records, weights)
        on_bytes(records.nbytes)

    step = max(1, PIECE_NBYTES // record_nbytes)
    pieces = [(layer, slice(e, e + step)) for layer in range(len(banks)) for e in range(0, experts, step)]
    run_all([partial(fill, *piece) for piece in pieces], THREADS, "checksums")
    return sums


def packed(sums: Sums) -> bytes:
    """As a message has them: 8 bytes each, little-endian."""
    return sums.astype("<i8").tobytes()


def unpacked(data: bytes, layers: int, experts: int) -> Sums:
    """[L, E]. ValueError if it is not as many."""
    return np.frombuffer(data, "<i8").astype(np.int64).reshape(layers, experts)


def _mixed(numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """SplitMix64's outputs number 0, 1, ... from seed 0 (Steele, Lea and Flood, 2014)."""
    state = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
