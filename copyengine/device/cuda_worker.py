"""The CUDA backend of a worker: memory that the copy engine can map, the ring that kernels write, flags to wait for.

Words are written and read on a stream of our own, since the compute stream may be waiting for just these words. Where
eight streams of a process wait, what is written stands behind them (by a memset and by a copy; one that waits is no
trouble, reading never is: H200, 2026-11); a worker has one that does.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from copyengine.device import Bytes, OnBytes
from copyengine.device.cuda_driver import HOST_MAPPED, HOST_PORTABLE, CudaError, Driver, load_driver
from copyengine.device.cuda_gpu import Gpu, check_ordinal
from copyengine.device.host import Segment
from copyengine.device.pinned import PinnedBank, register_pinned
from copyengine.protocol import MemoryHandle
from copyengine.sync import YIELD_S, nap
from copyengine.wire.errors import ConfigError

BLOCK_NBYTES = 2 << 20
"""The driver puts smaller allocations together into blocks of this size, and exports whole blocks."""

WORDS = 1024
"""How many words are read at a time."""

WORDS_S = 5.0
"""Seconds that writing or reading words may take."""

TOUCH_THREADS = 8
"""That take host memory from the system before it is pinned."""


class DeviceMemory:
    """Device memory that the copy engine can open."""

    def __init__(self, gpu: Gpu, address: int, handle: MemoryHandle) -> None:
        self.address = address
        self.handle = handle
        self.nbytes = handle.nbytes
        self._gpu = gpu

    def close(self) -> None:
        """Free it. A second call does nothing."""
        if self.nbytes:
            self.nbytes = 0
            self._gpu.enter()
            self._gpu.driver.free(self.address)


class MappedRing:
    """A ring's segment, pinned; `address` is where the device finds it."""

    def __init__(self, gpu: Gpu, ring: Segment) -> None:
        """CudaError if it cannot be pinned."""
        self._gpu = gpu
        self._array = ring.array  # keeps the mapping
        self._host = ring.array.ctypes.data
        gpu.enter()
        gpu.driver.register_host(self._host, _whole(ring.nbytes, mmap.PAGESIZE), HOST_MAPPED | HOST_PORTABLE)
        self._closed = False
        try:
            self.address = gpu.driver.device_address(self._host)
        except CudaError:
            self.close()
            raise

    def close(self) -> None:
        """Take the device's access back. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._gpu.enter()
            self._gpu.driver.unregister_host(self._host)


class MappedHostMemory:
    """Pinned host memory that the device reads and writes where it lies, zeroed; `address` is where the device finds
    it, `array` [nbytes] uint8 where the processor does."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        """CudaError or OSError if it cannot be had."""
        self._bank: PinnedBank = register_pinned(
            gpu.driver, gpu.enter, nbytes, TOUCH_THREADS, HOST_MAPPED | HOST_PORTABLE
        )
        try:
            self.address = gpu.driver.device_address(self._bank.address)
        except CudaError:
            self._bank.close()
            raise
        self.nbytes = nbytes
        self.array: Bytes = self._bank.array

    def close(self) -> None:
        """Take the device's access back; arrays that look into it stay valid. A second call does nothing."""
        self._bank.close()


class CudaWorkerDevice:
    """One GPU for one worker. Words may be written and read by any thread, all else by one at a time."""

    def __init__(self, ordinal: int, local: bool, driver: Driver | None = None) -> None:
        """GPU number `ordinal`. `local`: the copy engine is in this process and takes plain addresses.

        Its primary context becomes the calling thread's. ConfigError if there is no CUDA, or no such GPU of use.
        """
        self._driver = driver or load_driver()
        check_ordinal(self._driver, ordinal)
        self._local = local
        self._lock = threading.Lock()
        with ExitStack() as undo:
            self._gpu = Gpu(self._driver, self._driver.device(ordinal))
            undo.callback(self._gpu.close)
            self._gpu.enter()
            self._stream = self._driver.stream()
            undo.callback(self._driver.destroy_stream, self._stream)
            self._event = self._driver.event()
            undo.callback(self._driver.destroy_event, self._event)
            self._words = self._driver.allocate_host(4 * WORDS)
            undo.callback(self._driver.free_host, self._words)
            self._close = undo.pop_all()
        self.link = self._gpu.link  # PCI bus id
        self.has_stream_waits = self._gpu.has_stream_operations

    def allocate(self, nbytes: int, on_bytes: OnBytes | None = None) -> DeviceMemory:
        """Zeroed memory. ConfigError if there is not that much, or the copy engine's process could not map it.

        `on_bytes` is called with `nbytes` once it is there; nothing is left if it raises.
        """
        driver, whole = self._driver, _whole(nbytes, BLOCK_NBYTES)
        self._gpu.enter()
        try:
            address = driver.allocate(whole)
        except CudaError as error:
            free, total = driver.memory()
            raise ConfigError(
                f"GPU {self.link} has no {nbytes} bytes for it: {error}; {free} of {total} are free: "
                "lower --slots or --kv-tokens, or see what holds the GPU with nvidia-smi"
            ) from None
        memory = DeviceMemory(self._gpu, address, MemoryHandle("cuda_local", f"{address:x}", nbytes, self.link))
        try:
            self.write_words(address, 0, whole // 4)
            if not self._local:
                memory.handle = MemoryHandle("cuda_ipc", self._export(address), nbytes, self.link)
            if on_bytes is not None:
                on_bytes(nbytes)
        except BaseException:
            memory.close()
            raise
        return memory

    def allocate_host(self, nbytes: int) -> MappedHostMemory:
        """Host memory for the device to read and write in place. ConfigError, naming the settings, if it cannot be."""
        try:
            return MappedHostMemory(self._gpu, nbytes)
        except (CudaError, OSError, MemoryError) as error:
            raise ConfigError(
                f"{nbytes} bytes of host memory could not be pinned for GPU {self.link}: {error}; free host memory, or "
                "use --kv-placement device and --token-embedding-placement device"
            ) from None

    def map_ring(self, ring: Segment) -> MappedRing:
        """Let the device write `ring`. CudaError if that cannot be."""
        return MappedRing(self._gpu, ring)

    def wait_flag(self, stream: int, address: int) -> None:
        """Hold `stream`, a CUDA stream's handle, until the flag at `address` is up. May be captured in a graph."""
        self._gpu.enter()
        self._driver.wait_for_word(address, 1, stream)

    def write_words(self, address: int, value: int, count: int) -> None:
        """Set `count` 32-bit words from `address` on, at once, whatever other streams do. CudaError after WORDS_S."""
        with self._at_once():
            self._driver.fill_words(address, value, count, self._stream)
            self._finish()

    def read_words(self, address: int, count: int) -> list[int]:
        """`count` 32-bit words from `address` on, at once, whatever other streams do. CudaError after WORDS_S."""
        words: list[int] = []
        with self._at_once():
            while len(words) < count:
                n = min(WORDS, count - len(words))
                self._driver.copy_to_host(self._words, address + 4 * len(words), 4 * n, self._stream)
                self._finish()
                words += (ctypes.c_uint32 * n).from_address(self._words)
        return words

    def close(self) -> None:
        """Give up the GPU; what was allocated or mapped must be closed before."""
        self._gpu.enter()
        self._close.close()

    def _export(self, address: int) -> str:
        try:
            return self._driver.export(address).hex()
        except CudaError as error:
            raise ConfigError(
                f"GPU {self.link} gives its memory to no other process: {error}; use --copy-engine thread"
            ) from None

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Our stream is the caller's alone, also while another thread captures a graph."""
        with self._lock:
            self._gpu.enter()
            before = self._driver.relax_capture()
            try:
                yield
            finally:
                self._driver.relax_capture(before)

    def _finish(self) -> None:
        """Wait until our stream has nothing more to do."""
        self._driver.record(self._event, self._stream)
        start = time.monotonic()
        while not self._driver.has_happened(self._event):
            waited = time.monotonic() - start
            if waited > WORDS_S:
                raise CudaError("cuEventQuery", f"CUDA_ERROR_NOT_READY after {WORDS_S:g} s")
            if waited > YIELD_S:  # the shortest nap takes 85 µs (Linux 6.18, 2026-11)
                nap(waited)


def _whole(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
