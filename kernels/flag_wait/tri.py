# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: a word that another processor writes, looked at until it changes."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load_acquire(address, THREADS: tl.constexpr, PTX: tl.constexpr):
    """The word at `address`, which the host or its DMA may write, read by one thread and given to all of THREADS.

    What its writer wrote before it is seen by what the program reads after. No atomic, which over PCIe could undo a
    write.
    """
    lane = tl.arange(0, THREADS)
    if PTX:
        value = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $2, 0; mov.b32 $0, 0; @p ld.acquire.sys.global.b32 $0, [$1]; }",
            "=&r,l,r",
            [address, lane],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        value = tl.where(lane == 0, tl.load(address.to(tl.pointer_type(tl.int32))), 0)
    return tl.sum(value)


@triton.jit(do_not_specialize=["index"])
def spin_kernel(flags, index, PTX: tl.constexpr):
    address = (flags + index).to(tl.int64)
    while load_acquire(address, 32, PTX) == 0:
        pass


def spin_until_set(flags: Tensor, index: int) -> None:
    """See `kernels.flag_wait.spin_until_set`."""
    spin_kernel[(1,)](flags, index, PTX=isinstance(spin_kernel, triton.JITFunction), num_warps=1)
