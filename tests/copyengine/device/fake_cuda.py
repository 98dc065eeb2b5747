"""A CUDA driver in Python, with the functions of `cuda.bindings.driver` that we call: memory is real, GPUs are not.

Made for looking at what is done with it: every resource is counted until it is freed, a call without a current context
fails, one that frees something too, streams can be held so that what they were given waits, and any call can be told to
fail. Several FakeCuda on one FakeMachine are several processes. Streams write and copy when they are given work, or
when `go_on` is called after `hold`.
"""

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from copyengine.device.cuda_driver import Driver

MAJOR = 13


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801


OK = CUresult.CUDA_SUCCESS
INVALID = CUresult.CUDA_ERROR_INVALID_VALUE
RESULTS = {
    "cuMemGetInfo": 2,
    "cuMemGetAddressRange": 2,
    "cuCtxGetStreamPriorityRange": 2,
    **dict.fromkeys(("cuMemAlloc", "cuMemHostAlloc", "cuMemHostGetDevicePointer"), 1),
    **dict.fromkeys(("cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuDevicePrimaryCtxRetain"), 1),
    **dict.fromkeys(("cuStreamCreateWithPriority", "cuEventCreate"), 1),
}
"""What calls return beside their status, of those that tests have fail; None each then, as the bindings do it."""

ATTRIBUTES = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "CAN_USE_64_BIT_STREAM_MEM_OPS")


class CUipcMemHandle:
    def __init__(self) -> None:
        self._reserved = bytes(64)

    @property
    def reserved(self) -> bytes:
        return self._reserved

    @reserved.setter
    def reserved(self, value: bytes) -> None:
        if len(value) != 64:
            raise ValueError("reserved length must be 64")
        self._reserved = value


class FakeGpu:
    def __init__(self, bus_id: str, total_nbytes: int, stream_operations: bool) -> None:
        self.bus_id = bus_id
        self.total_nbytes = total_nbytes
        self.stream_operations = stream_operations
        self.context_error = CUresult.CUDA_SUCCESS  # what asking for a context fails with


class FakeMachine:
    """GPUs and the memory on them, for all processes."""

    def __init__(self, gpus: int = 2, gpu_nbytes: int = 64 << 20, stream_operations: bool = True) -> None:
        self.gpus = [FakeGpu(f"0000:{i + 1:02x}:00.0", gpu_nbytes, stream_operations) for i in range(gpus)]
        self.buffers: dict[int, tuple[int, Any]] = {}  # by address: GPU (-1 for the host) and bytes
        self.exports: dict[bytes, int] = {}

    def allocate(self, gpu: int, nbytes: int) -> int | None:
        if gpu >= 0 and nbytes > self.free(gpu):
            return None
        buffer = (ctypes.c_uint8 * nbytes)()
        address = ctypes.addressof(buffer)
        ctypes.memset(address, 0xEE, nbytes)  # nobody may rely on zeros
        self.buffers[address] = gpu, buffer
        return address

    def free(self, gpu: int) -> int:
        used = sum(len(buffer) for where, buffer in self.buffers.values() if where == gpu)
        return self.gpus[gpu].total_nbytes - used

    def owner(self, address: int) -> int | None:
        """The address of the allocation that `address` is in."""
        return next((a for a, (_, buffer) in self.buffers.items() if a <= address < a + len(buffer)), None)


@dataclass
class Stream:
    held: bool = False
    given: list[Callable[[], None]] = field(default_factory=list)

    def do(self, work: Callable[[], None]) -> None:
        self.given.append(work)
        if not self.held:
            self.go_on(len(self.given))

    def go_on(self, count: int = 1) -> None:
        for _ in range(count):
            self.given.pop(0)()


class FakeCuda:
    """One process's driver. `live` counts what is not freed, `calls` what was called, `fails` says which call fails
    next, with what, and `broken` what every call on a stream fails with.
    """

    def __init__(self, machine: FakeMachine, version: int = 13000) -> None:
        self.machine = machine
        self.version = version
        self.live: Counter[str] = Counter()
        self.calls: list[str] = []
        self.fails: dict[str, CUresult] = {}
        self.broken = OK
        self.no_ipc = False
        self.streams: list[Stream] = []
        self.copies: list[tuple[int, int, int]] = []  # target, source, bytes
        self.pin_limit_nbytes: int | None = None  # what may be registered at a time
        self.no_pinned_buffers = False
        self.registered: dict[int, tuple[int, int]] = {}  # bytes and flags by address
        self.thread = threading.local()  # .gpu, .relaxed
        self.events = itertools.count(1)
        self.happened: set[int] = set()
        self.opened: Counter[int] = Counter()
        self.CUresult = CUresult
        self.CUipcMemHandle = CUipcMemHandle
        self.CUdeviceptr = lambda address: SimpleNamespace(address=address)
        self.CUmemcpyAttributes = SimpleNamespace
        self.CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
        self.CUdevice_attribute = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in ATTRIBUTES})

    def driver(self) -> Driver:
        return Driver(self, MAJOR)

    def hold(self) -> None:
        for stream in self.streams:
            stream.held = True

    def go_on(self) -> None:
        """All that was held up happens."""
        for stream in self.streams:
            stream.held = False
            stream.go_on(len(stream.given))

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("cu"):
            return value

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.fails and name != "cuGetErrorName":
                return self.fails.pop(name), *[None] * RESULTS.get(name, 0)
            return value(*arguments)

        return call

    # Devices and contexts

    def cuInit(self, flags: int) -> Any:
        return (OK if self.machine.gpus else CUresult.CUDA_ERROR_NO_DEVICE,)

    def cuDriverGetVersion(self) -> Any:
        return OK, self.version

    def cuGetErrorName(self, status: CUresult) -> Any:
        return OK, status.name.encode() + b"\0"

    def cuDeviceGetCount(self) -> Any:
        return OK, len(self.machine.gpus)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return OK, ordinal

    def cuDeviceGetByPCIBusId(self, bus_id: bytes) -> Any:
        for i, gpu in enumerate(self.machine.gpus):
            if gpu.bus_id.encode() == bus_id:
                return OK, i
        return CUresult.CUDA_ERROR_INVALID_DEVICE, None

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> Any:
        return OK, self.machine.gpus[device].bus_id.encode().ljust(length, b"\0")

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return OK, b"Fake".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> Any:
        values = dict(zip(ATTRIBUTES, (9, 0, int(self.machine.gpus[device].stream_operations)), strict=True))
        return OK, values[attribute]

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        if self.machine.gpus[device].context_error:
            return self.machine.gpus[device].context_error, None
        self.live[f"context {device}"] += 1
        return OK, device

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        self.live[f"context {device}"] -= 1
        return (OK,)

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.thread.gpu = context
        return (OK,)

    def cuCtxGetStreamPriorityRange(self) -> Any:
        return OK, 0, -5

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> Any:
        before, self.thread.mode = getattr(self.thread, "mode", 0), mode
        return OK, before

    # Memory

    def cuMemGetInfo(self) -> Any:
        gpu = self.thread.gpu
        return OK, self.machine.free(gpu), self.machine.gpus[gpu].total_nbytes

    def cuMemAlloc(self, nbytes: int) -> Any:
        return self._allocate("device memory", self._gpu(), nbytes)

    def cuMemFree(self, address: int) -> Any:
        return self._free("device memory", address)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        assert flags == 1, "not portable"
        if self.no_pinned_buffers:
            return CUresult.CUDA_ERROR_NOT_PERMITTED, None
        return self._allocate("host memory", -1 if self._gpu() >= 0 else -2, nbytes)

    def cuMemFreeHost(self, address: int) -> Any:
        return self._free("host memory", address)

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        self._gpu()
        if not flags & 1 or address % 4096 or nbytes % 4096 or self._registrations(address, nbytes):
            return (INVALID,)
        if self.pin_limit_nbytes is not None and self._pinned_nbytes() + nbytes > self.pin_limit_nbytes:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        self.registered[address] = nbytes, flags
        self.live["registration"] += 1
        return (OK,)

    def cuMemHostUnregister(self, address: int) -> Any:
        self._gpu()
        if self.registered.pop(address, None) is None:
            return (INVALID,)
        self.live["registration"] -= 1
        return (OK,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> Any:
        if not self.registered.get(address, (0, 0))[1] & 2:
            return INVALID, None
        return OK, address + 0x1000

    def cuMemGetAddressRange(self, address: int) -> Any:
        owner = self.machine.owner(address)
        return (INVALID, None, None) if owner is None else (OK, owner, len(self.machine.buffers[owner][1]))

    def cuIpcGetMemHandle(self, address: int) -> Any:
        if self.no_ipc:
            return CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        handle = CUipcMemHandle()
        handle.reserved = address.to_bytes(64, "big")
        self.machine.exports[handle.reserved] = address
        return OK, handle

    def cuIpcOpenMemHandle(self, handle: CUipcMemHandle, flags: int) -> Any:
        address = self.machine.exports.get(handle.reserved)
        if address is None or address not in self.machine.buffers or self._gpu() != self.machine.buffers[address][0]:
            return INVALID, None
        self.opened[address] += 1
        self.live["mapping"] += 1
        return OK, address

    def cuIpcCloseMemHandle(self, address: int) -> Any:
        if self.opened[address] < 1 or self._gpu() != self.machine.buffers[address][0]:
            return (INVALID,)
        self.opened[address] -= 1
        self.live["mapping"] -= 1
        return (OK,)

    # Streams

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        self._gpu()
        self.streams.append(Stream())
        self.live["stream"] += 1
        return OK, self.streams[-1]

    def cuStreamDestroy(self, stream: Stream) -> Any:
        self._gpu()
        self.streams.remove(stream)
        self.live["stream"] -= 1
        return (OK,)

    def cuEventCreate(self, flags: int) -> Any:
        self._gpu()
        self.live["event"] += 1
        return OK, next(self.events)

    def cuEventDestroy(self, event: int) -> Any:
        self._gpu()
        self.live["event"] -= 1
        return (OK,)

    def cuEventRecord(self, event: int, stream: Stream) -> Any:
        self.happened.discard(event)
        return self._do(stream, lambda: self.happened.add(event))

    def cuEventQuery(self, event: int) -> Any:
        return (self.broken or (OK if event in self.happened else CUresult.CUDA_ERROR_NOT_READY),)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: Stream) -> Any:
        touched = self._registrations(source, nbytes)
        if touched or self.machine.owner(source) is not None:
            return self._copy(target, source, nbytes, stream)
        self.copies.append((target, source, nbytes))
        pageable = ctypes.string_at(source, nbytes)  # read at once, landing in the order of the stream
        return self._do(stream, lambda: ctypes.memmove(target, pageable, nbytes))

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: Stream) -> Any:
        return self._do(stream, lambda: ctypes.memmove(target, source, nbytes))

    def cuMemcpyBatchAsync(
        self,
        targets: Sequence[Any],
        sources: Sequence[Any],
        sizes: Sequence[int],
        count: int,
        attributes: Sequence[Any],
        firsts: Sequence[int],
        numbers: int,
        stream: Stream,
    ) -> Any:
        assert len(targets) == len(sources) == len(sizes) == count and list(firsts) == [0] and numbers == 1
        assert attributes[0].srcAccessOrder == 1
        for target, source, nbytes in zip(targets, sources, sizes, strict=True):
            status = self._copy(target.address, source.address, nbytes, stream)
        return status

    def cuMemsetD32Async(self, address: int, value: int, count: int, stream: Stream) -> Any:
        def fill() -> None:
            words = (ctypes.c_uint32 * count).from_address(address)
            words[:] = [value] * count

        return self._do(stream, fill)

    def cuStreamWriteValue32(self, stream: Stream, address: int, value: int, flags: int) -> Any:
        return self.cuMemsetD32Async(address, value, 1, stream)

    def cuStreamWaitValue32(self, stream: Any, address: int, value: int, flags: int) -> Any:
        self.calls.append(f"{stream} waits for {address} {'>=' if flags == 0 else '?'} {value}")
        return (OK,)

    def _pinned_nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.registered.values())

    def _registrations(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """(address, bytes) of those that a range lies in or touches."""
        found = self.registered.items()
        return [
            (start, length) for start, (length, _) in found if start < address + nbytes and address < start + length
        ]

    def _copy(self, target: int, source: int, nbytes: int, stream: Stream) -> Any:
        """From pinned memory: of one registration, or of one allocation of the driver's."""
        whole = [start <= source and source + nbytes <= start + n for start, n in self._registrations(source, nbytes)]
        if whole != [True] and self.machine.owner(source) is None:
            return (INVALID,)
        self.copies.append((target, source, nbytes))
        return self._do(stream, lambda: ctypes.memmove(target, source, nbytes))

    def _do(self, stream: Stream, work: Callable[[], Any]) -> Any:
        self._gpu()
        if not self.broken:
            stream.do(work)
        return (self.broken,)

    def _gpu(self) -> int:
        """The current context's."""
        assert hasattr(self.thread, "gpu"), "no context is current"
        assert self.live[f"context {self.thread.gpu}"] > 0, "the current context is gone"
        return int(self.thread.gpu)

    def _allocate(self, what: str, gpu: int, nbytes: int) -> Any:
        address = self.machine.allocate(gpu, nbytes)
        if address is None:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.live[what] += 1
        return OK, address

    def _free(self, what: str, address: int) -> Any:
        self._gpu()
        assert address in self.machine.buffers, "freed twice, or not the start of an allocation"
        del self.machine.buffers[address]
        self.live[what] -= 1
        return (OK,)
