"""Tiles and splits of the latent attention kernels, from shapes and the GPU's shared memory alone: pure, no torch.

A tile of latents is at once keys and values, so it is read once for both and stays in shared memory between the two
products: 32 positions of 512 + 64 bfloat16 are 37 kB. Chosen so that it fits beside q, and no register spills, on
sm_80, sm_86, sm_90 and sm_120 (tests/kernels/test_latent_attention.py compiles them all); not yet swept.
"""

from typing import NamedTuple

MAX_RANK = 512
"""R, of the latent."""
MAX_ROPE = 64
"""P, of the rotated part."""
PROGRAMS = 128
"""As many programs as keep a large GPU busy (an H200 has 132 multiprocessors): below it the context is split."""
LEAST_SHARE = 256
"""Positions that are worth a program and a part of the merge."""


class Tile(NamedTuple):
    """block_m rows (pairs of token and head) by block_n positions.

    `chunk` of R at a time in a product of q and latents, and `block_v` of R are what a program sums up, both R where
    shared memory allows it. `stages` counts as in kernels.attention.cost; 0 is a loop that Triton's
    interpreter can run.
    """

    block_m: int
    block_n: int
    chunk: int
    block_v: int
    stages: int
    warps: int


def tile(heads: int, itemsize: int, shared_nbytes: int) -> Tile:
    """For elements of `itemsize` bytes on a GPU whose programs may have `shared_nbytes` of shared memory."""
    if itemsize == 4:
        return Tile(16, 16, 32, 128, 2, 4)
    if shared_nbytes >= 200 * 1024 and heads > 16:
        return Tile(64, 32, MAX_RANK, MAX_RANK, 3, 8)
    if shared_nbytes >= 150 * 1024:
        return Tile(16, 32, MAX_RANK, MAX_RANK, 5, 4)
    return Tile(16, 16, MAX_RANK, MAX_RANK, 5, 4)


def prefill_splits(rows: int, heads: int, length: int, chosen: Tile) -> int:
    """Into how many parts, a power of two, the context of `length` positions is cut for a chunk of `rows`."""
    programs = -(-rows * heads // chosen.block_m)
    return _power_of_two(min(PROGRAMS // max(1, programs), length // LEAST_SHARE))


def decode_splits(heads: int, chosen: Tile) -> int:
    """The same for each sequence of a decode step, from the model alone, so that a row's bits depend on nothing else.

    One sequence's are enough for PROGRAMS programs; their sums take 4 * heads * splits * (R + 2) bytes for each.
    """
    return max(8, _power_of_two(PROGRAMS // -(-heads // chosen.block_m)))


def _power_of_two(number: int) -> int:
    """The largest that is not above `number`; at least 1."""
    return 1 << max(0, number.bit_length() - 1)
