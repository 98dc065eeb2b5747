"""Tiles and splits of the attention kernels, from shapes and the GPU's shared memory alone: pure, no torch.

Chosen so that two buffers of keys and values fit shared memory beside q and no register spills on sm_80, sm_86, sm_90
and sm_120 (tests/kernels/test_attention.py compiles them all); not yet swept: `bench_small_kernels --sweep` does it.

**Why a kernel of our own for prefill.** torch's scaled_dot_product_attention reads keys and values in one piece, so a
chunk after a cached prefix would gather the whole context from its pages, layer by layer and chunk by chunk (64k
positions of 2 x 256 bfloat16: 134 MB read and written); its causal mask below the diagonal of a longer context depends
on which of its backends takes the call; and a chunk of a few tokens gives it heads x 1 programs over the whole context.
Here the pages are read where they are, the heads of a kv head are rows of one tile, and the context of a short chunk is
split. `tests/bench/bench_small_kernels.py` has both side by side.
"""

from typing import NamedTuple

PROGRAMS = 128
"""As many programs as keep a large GPU busy (an H200 has 132 multiprocessors): below it the context is split."""
LEAST_SHARE = 256
"""Positions that are worth a program and a part of the merge."""
MAX_GROUP = 32
"""Query heads of a kv head."""
MAX_HEAD_DIM = 256
"""D: what was compiled and fits into shared memory."""


class Tile(NamedTuple):
    """block_m rows (pairs of token and head) by block_n positions; `chunk` of D at a time in a product of q and k.

    `stages` counts the page number's, the keys' and the product's: 5 is two buffers (3 where the matrix unit reads
    shared memory itself). 0 is a loop that Triton's interpreter can run.
    """

    block_m: int
    block_n: int
    chunk: int
    stages: int
    warps: int


def prefill_plan(
    rows: int, heads: int, kv_heads: int, head_dim: int, length: int, itemsize: int, shared_nbytes: int
) -> tuple[Tile, int]:
    """The tile, and the number of parts, a power of two, into which the context of `length` positions is cut.

    For elements of `itemsize` bytes on a GPU whose programs may have `shared_nbytes` of shared memory.
    """
    pairs = rows * (heads // kv_heads)
    whole, split = prefill_tiles(head_dim, itemsize, shared_nbytes)
    if _prefill_splits(-(-pairs // whole.block_m) * kv_heads, length) > 1:
        splits = _prefill_splits(-(-pairs // split.block_m) * kv_heads, length)
        if splits > 1:
            return split, splits
    return whole, 1


def prefill_tiles(head_dim: int, itemsize: int, shared_nbytes: int) -> tuple[Tile, Tile]:
    """For a context in one piece and for one in parts, whose programs are to be many and hold partial sums."""
    if itemsize == 4:
        whole = Tile(32, 16, 32, 2, 8)
    elif shared_nbytes >= 200 * 1024:
        whole = Tile(128, 64, 256, 3, 8)
    elif head_dim > 128:
        whole = Tile(64, 32 if shared_nbytes >= 120 * 1024 else 16, 256, 5, 8)
    else:
        whole = Tile(128, 32, 256, 5, 8)
    return whole, whole._replace(block_m=min(whole.block_m, 64))


def _prefill_splits(programs: int, length: int) -> int:
    """For `programs` that would each take the whole context."""
    return _power_of_two(min(PROGRAMS // max(1, programs), length // LEAST_SHARE))


def decode_plan(heads: int, kv_heads: int, head_dim: int, itemsize: int, shared_nbytes: int) -> tuple[Tile, int]:
    """The tile, and the number of parts, a power of two, into which each sequence's context is cut.

    From the model and the GPU alone, so that a row's bits depend on nothing else. The splits of one sequence are enough
    for PROGRAMS programs; their partial sums take 4 * heads * splits * (D + 2) bytes for each sequence.
    """
    splits = max(8, _power_of_two(PROGRAMS // kv_heads))
    group = heads // kv_heads
    block_m, warps = (16, 4) if group <= 16 else (32, 8)
    if itemsize == 4:
        return Tile(block_m, 16, 32, 2, warps), splits
    large = group <= 16 and (shared_nbytes >= 150 * 1024 or head_dim <= 128)
    return Tile(block_m, 64 if large else 32, 256, 5, warps), splits


def _power_of_two(number: int) -> int:
    """The largest that is not above `number`; at least 1."""
    return 1 << max(0, number.bit_length() - 1)
