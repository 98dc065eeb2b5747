"""Host memory that GPUs copy from: pinned as far as the system lets us, of exactly the size asked for, known to all
contexts.

Pages are taken from the system, huge where it has them, and then registered: that the driver allocates and pins them in
one call takes ten times as long (tests/bench/bench_pinning.py measures both). Where it refuses (a limit on locked
memory, WSL2) the rest of a bank stays pageable, and copies of it go through staging.py.
"""

import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from copyengine.checkpoint.parallel import run_all
from copyengine.device import Bytes
from copyengine.device.cuda_driver import HOST_PORTABLE, CudaError, Driver
from copyengine.wire.logs import Log

TOUCH_NBYTES = 64 << 20
"""What one thread takes from the system at a time."""

LEAST_PIN_NBYTES = 16 << 20
"""Where a bank is refused, its half is asked for, and so on down to this."""

log = Log(__name__)


class PinnedBank:
    """See copyengine.device.Bank. After `close` no array that was taken from it may be used.

    `ends` are where registrations end, ascending; each begins where the one before it ends, the first at 0. A copy must
    not cross one. What lies behind the last is pageable.
    """

    def __init__(
        self, address: int, nbytes: int, array: Bytes, free: Callable[[], None], ends: Sequence[int] | None = None
    ) -> None:
        """`ends` is not given where all of it is one registration."""
        self.address = address
        self.nbytes = nbytes
        self.array = array
        self.ends = (nbytes,) if ends is None else tuple(min(end, nbytes) for end in ends)
        self.pinned_nbytes = self.ends[-1] if self.ends else 0
        self.is_one = self.ends == (nbytes,)
        self._free: Callable[[], None] | None = free

    def close(self) -> None:
        """See Bank."""
        if self._free is None:
            return
        free, self._free = self._free, None
        self.array, self.nbytes, self.pinned_nbytes = np.empty(0, np.uint8), 0, 0
        free()


def register_pinned(
    driver: Driver, enter: Callable[[], None], nbytes: int, threads: int, flags: int = HOST_PORTABLE
) -> PinnedBank:
    """Zeroed pages from the system, taken by `threads` threads, all of them registered as `flags` say, or none.

    In the context that `enter` makes its caller's; whatever thread closes the bank enters it as well. CudaError,
    OSError if there is not that much.
    """
    pages = _pages(nbytes, threads)
    address = pages.ctypes.data
    enter()
    driver.register_host(address, pages.nbytes, flags)
    return PinnedBank(address, nbytes, pages[:nbytes], partial(_unregister, driver, enter, [address]))


class Pinning:
    """Pins banks as far as that is allowed, in the context that `enter` makes its caller's. Used by any thread.

    Once even LEAST_PIN_NBYTES were refused nothing more is asked for until a bank has been freed.
    """

    def __init__(self, driver: Driver, enter: Callable[[], None]) -> None:
        self._driver = driver
        self._enter = enter
        self._lock = threading.Lock()
        self._refused = False

    def bank(self, nbytes: int, threads: int) -> PinnedBank:
        """Zeroed pages from the system, taken by `threads` threads, then pinned.

        Whatever thread closes the bank enters the context as well. OSError if there is not that much, CudaError if the
        GPU is broken.
        """
        pages = _pages(nbytes, threads)
        address = pages.ctypes.data
        self._enter()
        ends = self._register(address, pages.nbytes)
        return PinnedBank(address, nbytes, pages[:nbytes], partial(self._free, address, ends), ends)

    def _register(self, address: int, nbytes: int) -> list[int]:
        """Register from `address` on; where the registrations end. All in one if that goes, else ever smaller ones."""
        ends: list[int] = []
        start, size = 0, nbytes
        while start < nbytes and not self._refused:
            size = min(size, nbytes - start)
            try:
                self._driver.register_host(address + start, size)
            except CudaError as error:
                if not error.refuses_pinning:
                    self._free(address, ends)
                    raise
                if size <= LEAST_PIN_NBYTES:
                    self._give_up(error)
                size = _whole_pages(size // 2)
            else:
                start += size
                ends.append(start)
        return ends

    def _free(self, address: int, ends: Sequence[int]) -> None:
        if ends:
            _unregister(self._driver, self._enter, [address + start for start in (0, *ends[:-1])])
            self._refused = False

    def _give_up(self, error: CudaError) -> None:
        with self._lock:
            first, self._refused = not self._refused, True
        if first:
            log.warning(
                "pinning_refused",
                cause=str(error),
                detail="no more host memory can be pinned: the rest of the experts stays pageable, and copying them is "
                "slower; raise the limit on locked memory (ulimit -l), under WSL2 the memory of the virtual machine",
            )


def _pages(nbytes: int, threads: int) -> Bytes:
    """Whole pages of zeros for `nbytes`, there and not only promised."""
    whole = _whole_pages(nbytes)
    pages: Bytes = np.frombuffer(_private_mapping(whole), np.uint8)
    parts = [pages[start : start + TOUCH_NBYTES : mmap.PAGESIZE] for start in range(0, whole, TOUCH_NBYTES)]
    run_all([partial(part.fill, 0) for part in parts], threads, "bank-pages")
    return pages


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _unregister(driver: Driver, enter: Callable[[], None], addresses: Sequence[int]) -> None:
    """The thread that closes a bank may have no context, or that of another GPU."""
    enter()
    for address in addresses:
        driver.unregister_host(address)


def _private_mapping(nbytes: int) -> mmap.mmap:
    """Zeroed pages, huge ones where the system has them."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
