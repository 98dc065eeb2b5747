"""The CUDA backend of the copy engine: pinned banks, workers' pools mapped by CUDA IPC, copies by DMA.

Copies are DMA and never kernels: a copy kernel in this process takes 17-49 % from the worker's own speed, DMA 0-6 %
(H200, 2026-11). Flags are set by stream operations: a copy of 4 bytes in their place took 290 µs more.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from copyengine.device import STREAMS, Bank, Memory, OnBytes, Run, Stream
from copyengine.device.cuda_driver import CudaError, Driver, load_driver
from copyengine.device.cuda_gpu import Gpu, check_ordinal
from copyengine.device.pinned import PinnedBank, register_pinned
from copyengine.protocol import MemoryHandle
from copyengine.wire.errors import ConfigError, CopyFailed, PeerDied, WireError

BATCH_RUNS = 4
"""From this many runs on, all but the first are one call: scattered records of 2.8 MB went at 48.7 GB/s in batches of 8
and at 52.1 in batches of 128, at 47.1 and 51.1 one by one (H200, 2026-11, tests/bench/results). The first goes alone,
so that the link has work while the lists for the call are made, 2.4 µs of Python each."""

BATCH_RUN_NBYTES = 256 << 10
"""Shorter runs beside longer ones make a batch wait for its own end, silently."""

BANK_THREADS = 2
TOUCH_THREADS = 8
"""How banks are pinned: 27 GB/s like this, 2.0-2.7 by cuMemHostAlloc, copied equally fast from (H200, 16 cores,
2026-11, tests/bench/results/nvidia-h200_202611_pinning.md)."""


class CudaMemory:
    """A worker's device memory, mapped. See copyengine.device.Memory."""

    def __init__(self, device: "CudaCopyDevice", link: "_Link", handle: MemoryHandle, address: int) -> None:
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


class _Link:
    """A GPU, its two streams, and events that are not in use."""

    def __init__(self, gpu: Gpu) -> None:
        """Enters the GPU's context; closes the GPU if it fails."""
        self.gpu = gpu
        self.events: list[Any] = []
        driver = gpu.driver
        with ExitStack() as undo:
            undo.callback(gpu.close)
            gpu.enter()
            self.streams: dict[Stream, Any] = {}
            for stream in STREAMS:
                self.streams[stream] = driver.stream()
                undo.callback(driver.destroy_stream, self.streams[stream])
            self._close = undo.pop_all()

    def close(self) -> None:
        """Free all of it and leave the GPU."""
        self.gpu.enter()
        for event in self.events:
            self.gpu.driver.destroy_event(event)
        self._close.close()


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
        self._links: dict[str, _Link] = {}
        self._entered = threading.local()  # .link: whose context is the thread's
        check_ordinal(self._driver, ordinal)

    # Memory ----------------------------------------------------------------------------------------------------------

    def allocate_bank(self, run_id: str, label: str, nbytes: int, on_bytes: OnBytes | None = None) -> Bank:
        """See CopyDevice."""
        enter = partial(self._enter, self._link_of(self._driver.device(self._ordinal)))
        try:
            bank = register_pinned(self._driver, enter, nbytes, TOUCH_THREADS)
        except (CudaError, OSError) as error:
            raise ConfigError(
                f"cannot pin {nbytes} bytes of host memory ({label}): {error}; free memory or serve a smaller model"
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

    def _link_of(self, device: Any) -> _Link:
        bus_id = self._driver.bus_id(device)
        with self._lock:
            if bus_id not in self._links:
                self._entered.link = None  # the next line enters the new one, whether it succeeds or not
                self._links[bus_id] = _Link(Gpu(self._driver, device))
            return self._links[bus_id]

    def _enter(self, link: _Link) -> None:
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
        link = target.link
        self._enter(link)
        start, to = source.address, target.address
        try:
            if len(runs) >= BATCH_RUNS and self._driver.has_batches and min(r.nbytes for r in runs) >= BATCH_RUN_NBYTES:
                first, *rest = runs
                self._driver.copy_to_device(
                    to + first.target_offset, start + first.source_offset, first.nbytes, link.streams[stream]
                )
                self._driver.copy_batch_to_device(
                    [to + run.target_offset for run in rest],
                    [start + run.source_offset for run in rest],
                    [run.nbytes for run in rest],
                    link.streams[stream],
                )
            else:
                on = link.streams[stream]
                copy = self._driver.copy_to_device
                for run in runs:
                    copy(to + run.target_offset, start + run.source_offset, run.nbytes, on)
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
