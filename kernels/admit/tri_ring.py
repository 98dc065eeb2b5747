# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: the writer's side of the ring (copyengine/ring.py), and the words of `control` that belong to it."""

import triton
import triton.language as tl

from kernels.admit import device
from kernels.flag_wait.tri import load_acquire

HEAD, CONSUMED, ERROR, QUERIES, AT_ONCE, FAILED = (tl.constexpr(i) for i in range(device.CONTROL_WORDS))
"""Words of `control`: number of the next record, of the reader as last seen, error, the layer's cut, failed flags."""
assert (ERROR.value, FAILED.value) == (device.ERROR, device.FAILED)

RING_FULL = tl.constexpr(1)
CLEARED, LANDED, NOT_LANDED = (tl.constexpr(i) for i in range(3))
"""Of a flag."""

RING_CONSUMED, RING_CELLS, CELL_WORDS, CELL_PAIRS = (tl.constexpr(i) for i in (16, 48, 272, 16))
"""Words of the ring, as its reader in the copy engine has them."""

DEMAND, STREAM = (tl.constexpr(i) for i in range(2))
"""Kinds of records."""


@triton.jit
def store_release(address, word, THREADS: tl.constexpr, PTX: tl.constexpr):
    """Write a word of host memory from one thread, after all that the program wrote before."""
    tl.debug_barrier()
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $3, 0; @p st.release.sys.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [address, word, tl.arange(0, THREADS)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(address.to(tl.pointer_type(tl.int32)), word)


@triton.jit
def note_failures(flags, control, num_flags, BLOCK_F: tl.constexpr):
    """FAILED becomes 1 if one of the flags says that its copies did not land; call it before they are overwritten."""
    f = tl.arange(0, BLOCK_F)
    flag = tl.load(flags + f, f < num_flags, 0)
    tl.store(control + FAILED + f * 0, 1, flag > LANDED)


@triton.jit
def load_error(control, THREADS: tl.constexpr, PTX: tl.constexpr):
    """The word ERROR. By one thread: were each to look, the host's write could come between, and they would part."""
    return load_acquire((control + ERROR).to(tl.int64), THREADS, PTX)


@triton.jit
def wait_for_room(ring, head, consumed, capacity, spin_limit, error, control, THREADS: tl.constexpr, PTX: tl.constexpr):
    """`consumed` and `error` once the ring has a free cell, or the spinning has ended: then `error` is not 0.

    The host may end it too, by its own write into the word ERROR.
    """
    spins = 0
    while (head - consumed >= capacity) & (spins < spin_limit) & (error == 0):
        consumed = load_acquire(ring + RING_CONSUMED * 4, THREADS, PTX)
        error = load_error(control, THREADS, PTX)
        spins += 1
    if (head - consumed >= capacity) & (error == 0):
        error = RING_FULL
    return consumed, error


@triton.jit
def cell_of(ring, head, capacity):
    """Address of record `head`'s cell."""
    return ring + ((head & (capacity - 1)) * CELL_WORDS + RING_CELLS) * 4


@triton.jit
def write_header(cell, flag, kind, layer, n):
    """What precedes the pairs, but for the sequence number."""
    word = tl.arange(0, 4)
    value = tl.where(word == 0, flag, tl.where(word == 1, kind, tl.where(word == 2, layer, n)))
    tl.store((cell + 4).to(tl.pointer_type(tl.int32)) + word, value)


@triton.jit
def write_pairs(cell, place, expert, slot, mask):
    """Pairs (expert, slot) into the places of the record where `mask` is true."""
    pairs = (cell + CELL_PAIRS * 4).to(tl.pointer_type(tl.int64))
    tl.store(pairs + place, expert.to(tl.int64) | (slot.to(tl.int64) << 32), mask)
