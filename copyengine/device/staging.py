"""Copies of pageable memory to a GPU: through two pinned buffers, one of which is filled while the other is copied.

The processor fills them, so that who calls `send` is busy for as long as a copy within the host's memory takes: the
copy loop cuts background queries of such banks into single records (copier.py).
"""

import ctypes
from collections import deque
from typing import Any

import numpy as np

from copyengine.device import Bytes
from copyengine.device.cuda_driver import CudaError, Driver
from copyengine.sync import yield_core

STAGE_NBYTES = 1 << 20
"""Of one buffer. The first byte of a copy is under way once this much is filled, and copies of 32 KiB and less take a
slow path of the driver (tests/bench/results)."""


class _Buffer:
    """One of the two; `event` is behind the copy out of it, and goes back to `unused` when it has happened."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.array: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * STAGE_NBYTES).from_address(address))
        self.event: Any = None
        self.unused: list[Any] = []


class Staging:
    """For all GPUs of a process. Used by one thread at a time."""

    def __init__(self, driver: Driver) -> None:
        """In the caller's context, but known to all. CudaError if the buffers cannot be pinned."""
        self._driver = driver
        self._address = driver.allocate_host(2 * STAGE_NBYTES)
        self._buffers = deque(_Buffer(self._address + i * STAGE_NBYTES) for i in range(2))

    def send(self, source: Bytes, target: int, stream: Any, events: list[Any]) -> None:
        """Copy `source` to address `target`, behind all that `stream` was given; `source` is read on return.

        `events` are unused ones of the stream's context, which is the caller's. CudaError if a copy cannot be started;
        those of the bytes before it are then under way.
        """
        for start in range(0, source.nbytes, STAGE_NBYTES):
            part = source[start : start + STAGE_NBYTES]
            buffer = self._free_buffer()
            np.copyto(buffer.array[: part.nbytes], part)
            self._driver.copy_to_device(target + start, buffer.address, part.nbytes, stream)
            event = events.pop() if events else self._driver.event()
            try:
                self._driver.record(event, stream)
            except CudaError:
                events.append(event)
                raise
            buffer.event, buffer.unused = event, events
            self._buffers.rotate(-1)

    def close(self) -> None:
        """Free the buffers, in the caller's context; nothing may be copied out of them any more."""
        for buffer in self._buffers:
            if buffer.event is not None:
                buffer.unused.append(buffer.event)
        self._buffers.clear()
        self._driver.free_host(self._address)

    def _free_buffer(self) -> _Buffer:
        """The one used longer ago, once what was copied out of it is through. CudaError if the GPU is broken."""
        buffer = self._buffers[0]
        while buffer.event is not None:
            if self._driver.has_happened(buffer.event):
                buffer.unused.append(buffer.event)
                buffer.event = None
            else:
                yield_core()
        return buffer
