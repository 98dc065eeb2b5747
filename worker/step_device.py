"""What the slots of a GPU need of it; copyengine.device.cuda_worker and worker.cuda_backend have it."""

from collections.abc import Callable
from typing import Protocol

from copyengine.device import OnBytes
from copyengine.device.host import Segment
from copyengine.protocol import MemoryHandle


class Allocation(Protocol):
    """A run of device memory that the copy engine can open."""

    @property
    def address(self) -> int: ...

    @property
    def handle(self) -> MemoryHandle: ...

    def close(self) -> None: ...


class WritableRing(Protocol):
    """A ring that the device can write."""

    @property
    def address(self) -> int: ...

    def close(self) -> None: ...


class StepDevice(Protocol):
    """Memory, waits for flags, and words that are written and read at once; CudaError if the device is broken."""

    @property
    def has_stream_waits(self) -> bool: ...

    def allocate(self, nbytes: int, on_bytes: OnBytes | None = None) -> Allocation: ...

    def map_ring(self, ring: Segment) -> WritableRing: ...

    def wait_flag(self, stream: int, address: int) -> None: ...

    def write_words(self, address: int, value: int, count: int) -> None: ...

    def read_words(self, address: int, count: int) -> list[int]: ...


class StepStream(Protocol):
    """The compute stream: torch's current one on a GPU. RuntimeError if the device is broken."""

    def handle(self) -> int:
        """What the driver calls it."""
        ...

    def mark(self) -> Callable[[], bool] | None:
        """Tells whether all that the stream was given so far is done; None while a graph is being captured."""
        ...

    def synchronize(self) -> None:
        """Wait until all that the stream was given is done."""
        ...
