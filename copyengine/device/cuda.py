"""The CUDA backend of the copy engine: pinned banks, workers' pools mapped by CUDA IPC, copies by DMA.

Copies are DMA and never kernels: a copy kernel in this process takes 17-49 % from the worker's own speed, DMA 0-6 %
(H200, 2026-11). Flags are set by stream operations: a copy of 4 bytes in their place took 290 µs more.
"""

import threading
from collections.abc import Sequence
from typing import Any

from copyengine.device import Bank, Memory, OnBytes, Run, Stream
from copyengine.device.cuda_driver import CudaError, Driver, load_driver
from copyengine.device.cuda_gpu import Gpu, check_ordinal
from copyengine.device.cuda_link import Link
from copyengine.device.pinned import PinnedBank, Pinning
from copyengine.device.staging import Staging
from copyengine.protocol import MemoryHandle
from copyengine.wire.errors import ConfigError, CopyFailed, PeerDied, WireError
from copyengine.wire.logs import Log

BANK_THREADS = 2
"""Threads that pin banks at a time, and ..."""

TOUCH_THREADS = 8
"""... that touch their pages before: 27 GB/s like this, 2.0-2.7 by cuMemHostAlloc, copied equally fast from (H200, 16
cores, 2026-11, tests/bench/results/nvidia-h200_202611_pinning.md)."""


log = Log(__name__)


class CudaMemory:
    """A worker's device memory, mapped. See copyengine.device.Memory."""

    def __init__(self, device: "CudaCopyDevice", link: "Link", handle: MemoryHandle, address: int) -> None:
        self.handle = handle
        self.nbytes = handle.nbytes
        self.address = address
        self.link = link
        self._device = device

    def close(self) -> None:
        """See Memory."""
        if self.nbytes:
            self.nbytes = 0
            self._device._unmap(self)


class CudaCopyDevice:
    """See copyengine.device.CopyDevice. GPUs are taken into use as banks and workers need them."""

    bank_threads = BANK_THREADS

    def __init__(self, ordinal: int = 0, local: bool = False, driver: Driver | None = None) -> None:
        """Banks are pinned in the context of GPU number `ordinal`, which all other GPUs copy from as well.

        `local`: the workers are in this process, and so may send plain addresses. ConfigError if there is no CUDA or no
        such GPU.
        """
        self._driver = driver or load_driver()
        self._local = local
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}
        self._entered = threading.local()  # .link: whose context is the thread's
        self._pinning = Pinning(self._driver, self._enter_first)
        self._staging_lock = threading.Lock()
        self._staging: Staging | None = None
        self._no_staging = False  # its buffers could not be pinned
        check_ordinal(self._driver, ordinal)

    # Memory ----------------------------------------------------------------------------------------------------------

    def allocate_bank(self, run_id: str, label: str, nbytes: int, on_bytes: OnBytes | None = None) -> Bank:
        """See CopyDevice."""
        self._make_staging()  # before the banks have all that may be pinned
        try:
            bank = self._pinning.bank(nbytes, TOUCH_THREADS)
        except OSError as error:
            raise ConfigError(
                f"there are no {nbytes} bytes of host memory ({label}): {error}; free memory or serve a smaller model"
            ) from None
        try:
            if on_bytes is not None:
                on_bytes(nbytes)
        except BaseException:
            bank.close()
            raise
        return bank

    def open(self, handle: MemoryHandle) -> CudaMemory:
        """See CopyDevice."""
        if handle.kind != "cuda_ipc" and not (handle.kind == "cuda_local" and self._local):
            raise WireError(f"memory of kind {handle.kind} is of no use to this copy engine")
        try:
            device = self._driver.device_at(handle.device)
        except CudaError as error:
            raise WireError(f"there is no GPU {handle.device!r} here: {error}") from None
        link = self._link_of(device)
        self._enter(link)
        memory = CudaMemory(self, link, handle, self._map(handle))
        try:
            start, nbytes = self._driver.allocation(memory.address)
        except CudaError as error:
            memory.close()
            raise WireError(f"no memory is at {memory.address:#x}: {error}") from None
        if memory.address + handle.nbytes > start + nbytes:
            memory.close()
            raise WireError(f"memory of {nbytes} bytes is not one of {handle.nbytes}")
        return memory

    def close(self) -> None:
        """See CopyDevice."""
        if self._staging is not None:
            self._enter_first()
            self._staging.close()
            self._staging = None
        with self._lock:
            while self._links:
                _, link = self._links.popitem()
                link.close()
        self._entered = threading.local()

    def _map(self, handle: MemoryHandle) -> int:
        try:
            if handle.kind == "cuda_local":
                return int(handle.name, 16)
            exported = bytes.fromhex(handle.name)
        except ValueError:
            raise WireError(f"{handle.name!r} are no hexadecimal digits") from None
        try:
            return self._driver.open_export(exported)
        except ValueError as error:
            raise WireError(f"no IPC handle: {error}") from None
        except CudaError as error:
            raise PeerDied(
                f"GPU memory of a worker cannot be mapped: {error}; the worker is gone, or CUDA IPC does not work "
                "here: use --copy-engine thread"
            ) from None

    def _unmap(self, memory: CudaMemory) -> None:
        if memory.handle.kind == "cuda_ipc":
            self._enter(memory.link)
            self._driver.close_export(memory.address)

    def _make_staging(self) -> None:
        """The buffers for what cannot be pinned, unless there are some; if they cannot be pinned either, which is asked
        once, the driver copies pageable memory in its own way. CudaError if the GPU is broken."""
        self._enter_first()
        with self._staging_lock:
            if self._staging is None and not self._no_staging:
                try:
                    self._staging = Staging(self._driver)
                except CudaError as error:
                    if not error.refuses_pinning:
                        raise
                    self._no_staging = True
                    log.warning("staging_unpinned", detail=str(error))

    def _enter_first(self) -> None:
        """Make the context of the GPU that banks are pinned for the calling thread's."""
        self._enter(self._link_of(self._driver.device(self._ordinal)))

    def _link_of(self, device: Any) -> Link:
        bus_id = self._driver.bus_id(device)
        with self._lock:
            if bus_id not in self._links:
                self._entered.link = None  # the next line enters the new one, whether it succeeds or not
                self._links[bus_id] = Link(Gpu(self._driver, device))
            return self._links[bus_id]

    def _enter(self, link: Link) -> None:
        """Make the link's context the calling thread's, which nobody but us changes."""
        if getattr(self._entered, "link", None) is not link:
            link.gpu.enter()
            if self._local:
                self._driver.relax_capture()  # the worker's threads may capture graphs
            self._entered.link = link

    # Streams ---------------------------------------------------------------------------------------------------------

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        """See CopyDevice. CudaError if the GPU is broken."""
        assert isinstance(source, PinnedBank) and isinstance(target, CudaMemory)
        for run in runs:
            if run.target_offset + run.nbytes > target.nbytes or run.source_offset + run.nbytes > source.nbytes:
                raise CopyFailed(f"{run} is outside a bank of {source.nbytes} or a pool of {target.nbytes}")
        self._enter(target.link)
        try:
            if source.is_one:
                target.link.copy(stream, source.address, target.address, runs)
            else:
                for run in runs:
                    target.link.copy_piecewise(stream, source, target.address, run, self._staging)
        except CudaError as error:
            if error.refused:
                raise CopyFailed(str(error)) from None
            raise

    def write_flag(self, stream: Stream, flags: Memory, index: int, value: int) -> None:
        """See CopyDevice. CudaError if the GPU is broken."""
        assert isinstance(flags, CudaMemory)
        link = flags.link
        self._enter(link)
        address = flags.address + 4 * index
        if link.gpu.has_stream_operations:
            self._driver.write_word(address, value, link.streams[stream])
        else:
            self._driver.fill_words(address, value, 1, link.streams[stream])

    def mark(self, stream: Stream, target: Memory) -> Any:
        """See CopyDevice. CudaError if the GPU is broken."""
        assert isinstance(target, CudaMemory)
        link = target.link
        self._enter(link)
        event = link.events.pop() if link.events else self._driver.event()
        try:
            self._driver.record(event, link.streams[stream])
        except CudaError:
            link.events.append(event)
            raise
        return event, link.events

    def is_done(self, token: Any) -> bool:
        """See CopyDevice. CudaError if the GPU is broken."""
        event, unused = token
        if not self._driver.has_happened(event):
            return False
        unused.append(event)
        return True
