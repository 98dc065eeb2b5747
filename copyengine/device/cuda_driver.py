"""The calls of the CUDA driver that we make, typed: a failing one raises, naming call and error.

Addresses are integers; contexts, streams and events are what `cuda.bindings.driver` makes of them. That package is
imported when a Driver is loaded and not before: most machines have neither it nor a driver.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from copyengine.wire.errors import ConfigError
from copyengine.wire.logs import Log

HOST_PORTABLE, HOST_MAPPED = 1, 2
"""CU_MEMHOSTALLOC_*, CU_MEMHOSTREGISTER_*: known to all contexts; has an address for devices."""

STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
IPC_LAZY_PEER_ACCESS = 1
WAIT_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ: (int32)(word - value) >= 0."""

BATCH_VERSION = 12080
"""Driver that brought cuMemcpyBatchAsync. CUDA 13 gave it another form, so bindings of 13 need a driver of 13."""

PINNING_REFUSED = ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_OPERATING_SYSTEM")

INSTALL = "install the NVIDIA driver and `pip install cuda-bindings`, or use --device cpu"


log = Log(__name__)


class CudaError(Exception):
    """A call of the CUDA driver failed. `call` is its name, `error` the name of the error."""

    def __init__(self, call: str, error: str) -> None:
        super().__init__(f"{call}: {error}")
        self.call = call
        self.error = error

    @property
    def refused(self) -> bool:
        """Only this call failed. Any other error is an earlier operation's and stays: the context is of no use."""
        return self.error in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_HANDLE")

    @property
    def refuses_pinning(self) -> bool:
        """Of `register_host` and `allocate_host`: the system gives no more pinned memory, or none at all."""
        return self.refused or self.error in PINNING_REFUSED


def load_driver() -> "Driver":
    """The machine's driver, initialised. ConfigError if it or the package that calls it is missing."""
    try:
        api = importlib.import_module("cuda.bindings.driver")
        version = importlib.import_module("cuda.bindings").__version__
    except ImportError as error:
        raise ConfigError(f"CUDA is not there: {error}; {INSTALL}") from None
    try:
        return Driver(api, int(version.split(".")[0]))
    except (CudaError, RuntimeError) as error:  # the bindings raise RuntimeError if there is no libcuda
        raise ConfigError(f"CUDA is not there: {error}; {INSTALL}") from None


class Driver:
    """`api` has the functions of `cuda.bindings.driver`; `bindings` is that package's major version."""

    def __init__(self, api: Any, bindings: int) -> None:
        """Initialises the driver. CudaError if it cannot be."""
        self._api = api
        self._copy, self._write = api.cuMemcpyHtoDAsync, api.cuStreamWriteValue32
        self._record, self._query = api.cuEventRecord, api.cuEventQuery
        self._not_ready = api.CUresult.CUDA_ERROR_NOT_READY
        self._call("cuInit", 0)
        self.has_batches = self._call("cuDriverGetVersion") >= max(BATCH_VERSION, 1000 * bindings)
        self._batch_attributes: list[Any] = []

    # Devices and contexts --------------------------------------------------------------------------------------------

    def device_count(self) -> int:
        """How many GPUs this process sees."""
        return int(self._call("cuDeviceGetCount"))

    def device(self, ordinal: int) -> Any:
        """GPU number `ordinal`."""
        return self._call("cuDeviceGet", ordinal)

    def device_at(self, bus_id: str) -> Any:
        """The GPU at a PCI bus id."""
        return self._call("cuDeviceGetByPCIBusId", bus_id.encode())

    def bus_id(self, device: Any) -> str:
        """Where the GPU is, as 0000:1b:00.0."""
        return _text(self._call("cuDeviceGetPCIBusId", 32, device))

    def name(self, device: Any) -> str:
        """What the GPU is."""
        return _text(self._call("cuDeviceGetName", 128, device))

    def attribute(self, device: Any, name: str) -> int:
        """CU_DEVICE_ATTRIBUTE_`name`."""
        which = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", which, device))

    def has_stream_operations(self, device: Any) -> bool:
        """Whether its streams write and wait for words of memory. There is no attribute for 32 bits alone."""
        return self.attribute(device, "CAN_USE_64_BIT_STREAM_MEM_OPS") == 1

    def retain_context(self, device: Any) -> Any:
        """The GPU's primary context, made if nobody in this process has it yet."""
        return self._call("cuDevicePrimaryCtxRetain", device)

    def release_context(self, device: Any) -> None:
        """Undo one `retain_context`."""
        self._give_back("cuDevicePrimaryCtxRelease", device)

    def enter(self, context: Any) -> None:
        """Make `context` the calling thread's."""
        self._call("cuCtxSetCurrent", context)

    def relax_capture(self, mode: Any = None) -> Any:
        """Let the calling thread make any call while other threads capture graphs; the mode before, to go back to."""
        relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        return self._call("cuThreadExchangeStreamCaptureMode", relaxed if mode is None else mode)

    # Memory ----------------------------------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the current context's GPU."""
        status, free, total = self._api.cuMemGetInfo()
        self._check("cuMemGetInfo", status)
        return int(free), int(total)

    def allocate(self, nbytes: int) -> int:
        """Device memory."""
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """Free what `allocate` gave."""
        self._give_back("cuMemFree", address)

    def allocation(self, address: int) -> tuple[int, int]:
        """Start and length of the allocation in which `address` lies."""
        status, start, nbytes = self._api.cuMemGetAddressRange(address)
        self._check("cuMemGetAddressRange", status)
        return int(start), int(nbytes)

    def allocate_host(self, nbytes: int) -> int:
        """Pinned host memory that all contexts know."""
        return int(self._call("cuMemHostAlloc", nbytes, HOST_PORTABLE))

    def free_host(self, address: int) -> None:
        """Free what `allocate_host` gave."""
        self._give_back("cuMemFreeHost", address)

    def register_host(self, address: int, nbytes: int, flags: int = HOST_PORTABLE) -> None:
        """Pin whole pages of host memory."""
        self._call("cuMemHostRegister", address, nbytes, flags)

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""
        self._give_back("cuMemHostUnregister", address)

    def device_address(self, address: int) -> int:
        """At what address a device finds host memory that was registered as HOST_MAPPED."""
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def export(self, address: int) -> bytes:
        """An IPC handle of what `allocate` gave."""
        return bytes(self._call("cuIpcGetMemHandle", address).reserved)

    def open_export(self, handle: bytes) -> int:
        """Another process's memory, mapped."""
        exported = self._api.CUipcMemHandle()
        exported.reserved = handle
        return int(self._call("cuIpcOpenMemHandle", exported, IPC_LAZY_PEER_ACCESS))

    def close_export(self, address: int) -> None:
        """Undo one `open_export`."""
        self._give_back("cuIpcCloseMemHandle", address)

    # Streams ---------------------------------------------------------------------------------------------------------

    def stream(self) -> Any:
        """A stream that does not wait for the default one, of the greatest priority: the driver keeps those apart from
        streams of other priorities, of which some share a queue and so can stand behind each other.
        """
        status, _, greatest = self._api.cuCtxGetStreamPriorityRange()
        self._check("cuCtxGetStreamPriorityRange", status)
        return self._call("cuStreamCreateWithPriority", STREAM_NON_BLOCKING, greatest)

    def destroy_stream(self, stream: Any) -> None:
        """Free a stream, once it has done what it was given."""
        self._give_back("cuStreamDestroy", stream)

    def event(self) -> Any:
        """An event."""
        return self._call("cuEventCreate", EVENT_DISABLE_TIMING)

    def destroy_event(self, event: Any) -> None:
        """Free an event."""
        self._give_back("cuEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        """Have `event` happen after all that `stream` was given so far."""
        (status,) = self._record(event, stream)
        if status:
            self._check("cuEventRecord", status)

    def has_happened(self, event: Any) -> bool:
        """Whether the event has. Errors of operations before it show here."""
        (status,) = self._query(event)
        if status:
            if status == self._not_ready:
                return False
            self._check("cuEventQuery", status)
        return True

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Start a copy from pinned host memory."""
        (status,) = self._copy(target, source, nbytes, stream)
        if status:
            self._check("cuMemcpyHtoDAsync", status)

    def copy_batch_to_device(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any
    ) -> None:
        """Start copies from pinned host memory, in any order. Only with `has_batches`."""
        api = self._api
        if not self._batch_attributes:
            attributes = api.CUmemcpyAttributes()
            attributes.srcAccessOrder = api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            self._batch_attributes.append(attributes)
        address, n = api.CUdeviceptr, len(sizes)
        to, start = [address(target) for target in targets], [address(source) for source in sources]
        status, *_ = api.cuMemcpyBatchAsync(to, start, list(sizes), n, self._batch_attributes, [0], 1, stream)
        self._check("cuMemcpyBatchAsync", status)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Start a copy to pinned host memory."""
        self._call("cuMemcpyDtoHAsync", target, source, nbytes, stream)

    def fill_words(self, address: int, value: int, count: int, stream: Any) -> None:
        """Set 32-bit words behind all that `stream` was given."""
        self._call("cuMemsetD32Async", address, value, count, stream)

    def write_word(self, address: int, value: int, stream: Any) -> None:
        """Set a 32-bit word behind all that `stream` was given, by a stream operation."""
        (status,) = self._write(stream, address, value, 0)
        if status:
            self._check("cuStreamWriteValue32", status)

    def wait_for_word(self, address: int, value: int, stream: Any) -> None:
        """Hold `stream` until the 32-bit word is at least `value`."""
        self._call("cuStreamWaitValue32", stream, address, value, WAIT_AT_LEAST)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The one thing that a call returns beside its status, if any."""
        status, *results = getattr(self._api, name)(*arguments)
        self._check(name, status)
        return results[0] if results else None

    def _give_back(self, name: str, *arguments: Any) -> None:
        """A call that frees something. In a context that is of no use any more it is gone already."""
        try:
            self._call(name, *arguments)
        except CudaError as error:
            if error.refused:
                raise
            log.warning("gpu_broken", detail=str(error))

    def _check(self, call: str, status: Any) -> None:
        if status:
            _, name = self._api.cuGetErrorName(status)
            raise CudaError(call, _text(name) if name else f"error {int(status)}")


def _text(data: bytes) -> str:
    return data.split(b"\0")[0].decode()
