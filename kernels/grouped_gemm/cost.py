"""Tiles of the Triton kernels, from T, K, E and the format alone: never from the pool or from what is resident.

Not measured yet: chosen from bytes and shared memory; `tests/bench/bench_kernels.py --sweep` measures candidates.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """block_m rows of x by block_n rows of W; block_k bytes of codes (nvfp4) or elements of W a step."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


class Tiles(NamedTuple):
    """Of the two kernels; they share block_m, by which the routes are cut."""

    gate_up: Tile
    down: Tile


def tiles(tokens: int, k: int, num_experts: int, format_name: str) -> Tiles:
    """For T = `tokens` tokens of K = `k` routes to E = `num_experts` experts."""
    block_m = _block_m(tokens, k, num_experts)
    match format_name:
        case "nvfp4":
            return Tiles(Tile(block_m, 64, 64, 3, 4), Tile(block_m, 64, 64, 3, 4))
        case "float32":
            return Tiles(Tile(block_m, 64, 32, 2, 4), Tile(block_m, 64, 32, 2, 4))
        case _:
            return Tiles(Tile(block_m, 64, 64, 3, 4), Tile(block_m, 64, 64, 3, 4))


def _block_m(tokens: int, k: int, num_experts: int) -> int:
    """The least of 16, 32, 64, 128 that takes an expert's mean share of the routes with a half to spare."""
    share = 1.5 * tokens * k / num_experts
    if tokens <= 16 or share <= 16:
        return 16
    return 32 if share <= 32 else 64 if share <= 64 else 128
