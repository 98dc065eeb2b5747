"""Tiles of the Triton kernels, from T, K, E, the format and the GPU: never from the pool or from what is resident.

nvfp4 on GPUs with warpgroup instructions: the best or within 2 % of it in a sweep on an H200 at H 2560, I 640, E 512,
K 10 (2026-11, lines "Sweep" of tests/bench/results/nvidia-h200_202611_kernels.md). The other formats' are not swept,
but chosen from bytes and shared memory. So are all on GPUs without them, whose matrix instructions take what is decoded
from registers that a warp has for itself: large tiles have more warps, fewer rows of W or both, so that they fit the
99 KiB of a GeForce and no register spills on sm_80, sm_86, sm_89 and sm_120 (tests/kernels/test_grouped_gemm.py).

Few tokens with about one route for each expert have tiles of one row, for kernels without matrix instructions
(tri_few). These give a thread 16 bytes of a row of W at a time, a program as many threads as x's loads need to stay
without shared memory, and a multiprocessor a few programs; they are not swept.
"""

from typing import NamedTuple

from kernels.formats import ExpertFormat

FEW_TOKENS = 16
"""At most; more are never worked on one row at a time."""

FIXED_ROWS = 32
"""Of blocks that are the same for one token and for thousands: a decode step's experts have few rows, but wait for
their weights longer than for products with rows that are not there; a chunk's read them once per block. Not swept."""

WARPGROUP_NBYTES = 200 * 1024
"""GPUs whose programs may have as much shared memory have warpgroup instructions."""
STAGED_NBYTES = 120 * 1024
"""At least, for three stages of FP8 codes, each step's with a scale for a few columns only."""


class Tile(NamedTuple):
    """block_m rows of x by block_n rows of W; block_k bytes of codes or elements of W a step.

    `stages` of the loop over k are under way at a time, or, of tiles of one row, in one turn of it.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


class Tiles(NamedTuple):
    """Of the two kernels; they share block_m, by which the routes are cut."""

    gate_up: Tile
    down: Tile


def tiles(tokens: int, k: int, num_experts: int, kind: ExpertFormat, shared_nbytes: int) -> Tiles:
    """For T = `tokens` tokens of K = `k` routes to E = `num_experts` experts.

    On a GPU whose programs may have `shared_nbytes` of shared memory.
    """
    if tokens <= FEW_TOKENS and tokens * k <= num_experts:
        return _few(kind.name)
    down_n = 128 if tokens >= 16 else 64  # fewer tokens would leave multiprocessors without a program
    return _of_rows(_block_m(tokens, k, num_experts), down_n, kind, shared_nbytes)


def fixed_tiles(kind: ExpertFormat, shared_nbytes: int) -> Tiles:
    """For any number of tokens, where a row's bits must not depend on it: see FIXED_ROWS."""
    return _of_rows(FIXED_ROWS, 128, kind, shared_nbytes)


def _of_rows(block_m: int, down_n: int, kind: ExpertFormat, shared_nbytes: int) -> Tiles:
    """Tiles with matrix instructions of blocks of `block_m` rows; `down_n` of nvfp4's and mxfp4's down."""
    if shared_nbytes < WARPGROUP_NBYTES and (others := _without_warpgroups(block_m, kind, shared_nbytes)):
        return others
    match kind.name:
        case "nvfp4" | "mxfp4" if block_m == 128:
            wide = 64 if kind.quantised_inputs else 128  # rounding what gate_up gives takes registers too
            return Tiles(Tile(block_m, wide, 64, 3, 8), Tile(block_m, 128, 64, 3, 4))
        case "nvfp4" | "mxfp4":
            return Tiles(Tile(block_m, 64, 64, 3, 4), Tile(block_m, down_n, 64, 3, 4))
        case "fp8_block" | "fp8_tensor":  # sums under a scale of their own take as many registers again
            warps = 8 if block_m == 128 else 4
            return Tiles(Tile(block_m, 64, 64, 3, warps), Tile(block_m, 64, 64, 3, 4))
        case "float32":
            return Tiles(Tile(block_m, 64, 32, 2, 4), Tile(block_m, 64, 32, 2, 4))
        case _:
            return Tiles(Tile(block_m, 64, 64, 3, 4), Tile(block_m, 64, 64, 3, 4))


def _without_warpgroups(block_m: int, kind: ExpertFormat, shared_nbytes: int) -> Tiles | None:
    """What takes the place of tiles that need warpgroup instructions or more shared memory; None: nothing has to.

    block_k stays that of the others: of 32 bytes of codes the scales are too few to be loaded ahead.
    """
    match kind.name:
        case "nvfp4" | "mxfp4" if block_m == 128:
            return Tiles(Tile(128, 32, 64, 3, 8), Tile(128, 64, 64, 3, 8))
        case "nvfp4" | "mxfp4" if block_m == 64:
            return Tiles(Tile(64, 64, 64, 3, 4), Tile(64, 128, 64, 3, 8))
        case "fp8_block" if block_m == 128 and shared_nbytes < STAGED_NBYTES and kind.block[1] % 64:
            return Tiles(Tile(128, 32, 64, 3, 8), Tile(128, 64, 64, 3, 8))
        case "float32" if block_m == 128:
            return Tiles(Tile(128, 64, 32, 2, 8), Tile(128, 64, 32, 2, 4))
        case "float32" if block_m == 32:
            return Tiles(Tile(32, 64, 32, 2, 4), Tile(32, 64, 32, 2, 8))
        case _:
            return None


def _few(format_name: str) -> Tiles:
    match format_name:
        case "nvfp4" | "mxfp4":
            return Tiles(Tile(1, 16, 256, 1, 8), Tile(1, 32, 64, 1, 4))
        case "fp8_block" | "fp8_tensor":
            return Tiles(Tile(1, 32, 128, 2, 8), Tile(1, 32, 128, 2, 8))
        case "float32":
            return Tiles(Tile(1, 16, 64, 2, 8), Tile(1, 16, 64, 2, 8))
        case _:
            return Tiles(Tile(1, 16, 128, 2, 8), Tile(1, 16, 128, 2, 8))


def _block_m(tokens: int, k: int, num_experts: int) -> int:
    """The least of 16, 32, 64, 128 that takes an expert's mean share of the routes with a half to spare."""
    share = 1.5 * tokens * k / num_experts
    if tokens <= 16 or share <= 16:
        return 16
    return 32 if share <= 32 else 64 if share <= 64 else 128
