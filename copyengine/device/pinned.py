"""Host memory that GPUs copy from: pinned, of exactly the size asked for, known to all contexts.

Pages are taken from the system, huge where it has them, and then registered: that the driver allocates and pins them in
one call takes ten times as long (tests/bench/bench_pinning.py measures both).
"""

import mmap
import sys
from collections.abc import Callable
from functools import partial

import numpy as np

from copyengine.checkpoint.parallel import run_all
from copyengine.device import Bytes
from copyengine.device.cuda_driver import HOST_PORTABLE, Driver

TOUCH_NBYTES = 64 << 20
"""What one thread takes from the system at a time."""


class PinnedBank:
    """See copyengine.device.Bank. After `close` no array that was taken from it may be used."""

    def __init__(self, address: int, nbytes: int, array: Bytes, free: Callable[[], None]) -> None:
        self.address = address
        self.nbytes = nbytes
        self.array = array
        self._free: Callable[[], None] | None = free

    def close(self) -> None:
        """See Bank."""
        if self._free is None:
            return
        free, self._free = self._free, None
        self.array, self.nbytes = np.empty(0, np.uint8), 0
        free()


def register_pinned(
    driver: Driver, enter: Callable[[], None], nbytes: int, threads: int, flags: int = HOST_PORTABLE
) -> PinnedBank:
    """From the system, by `threads` threads, then registered in the context that `enter` makes its caller's.

    Whatever thread closes the bank enters it as well. CudaError, OSError if there is not that much.
    """
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = _private_mapping(whole)
    pages: Bytes = np.frombuffer(mapping, np.uint8)
    parts = [pages[start : start + TOUCH_NBYTES : mmap.PAGESIZE] for start in range(0, whole, TOUCH_NBYTES)]
    run_all([partial(part.fill, 0) for part in parts], threads, "bank-pages")
    address = pages.ctypes.data
    enter()
    driver.register_host(address, whole, flags)
    return PinnedBank(address, nbytes, pages[:nbytes], partial(_free_in, enter, driver.unregister_host, address))


def _free_in(enter: Callable[[], None], free: Callable[[int], None], address: int) -> None:
    """The thread that closes a bank may have no context, or that of another GPU."""
    enter()
    free(address)


def _private_mapping(nbytes: int) -> mmap.mmap:
    """Zeroed pages, huge ones where the system has them."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
