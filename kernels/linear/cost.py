"""Tiles of the Triton product, from the shape of the weight and its type alone: pure, no torch.

A tile is the same for one row and for thousands, so it is a compromise: wide enough for prefill to use matrix
instructions, not so wide that few programs read the weights of a decode step. Rows that are not there cost a decode
step multiplications while it waits for weights. Compiled for sm_80, sm_86, sm_90 and sm_120
(tests/kernels/test_fixed_triton.py), not swept.
"""

from typing import NamedTuple

WIDE = 16_384
"""Rows of a weight of which tiles of 128 leave a large GPU's every multiprocessor a program."""


class Tile(NamedTuple):
    """block_m rows of x by block_n rows of the weight, block_k columns of both a step; `stages` steps are under way.

    0 stages are a loop that Triton's interpreter can run.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


def tile(out_features: int, itemsize: int) -> Tile:
    """For a weight of `out_features` rows of elements of `itemsize` bytes."""
    if itemsize == 4:
        return Tile(32, 64, 32, 2, 4)
    return Tile(64, 128 if out_features >= WIDE else 64, 64, 3, 4)
