"""How fast experts can be copied here, measured for a moment: to a GPU by DMA, on the host by memcpy."""

import time
from contextlib import ExitStack

import numpy as np
from msgspec import Struct

from copyengine.device.cuda_driver import CudaError, Driver, load_driver
from copyengine.device.cuda_gpu import Gpu
from copyengine.wire.errors import ConfigError

BUFFER_NBYTES = 64 << 20
"""Far more than caches hold."""

PIECE_NBYTES = 4 << 20
"""Bytes of one copy, as of one expert: the rate of copies that are large."""

MEASURED_S = 0.1
"""Seconds of copying at least: short beside a start, and long beside one copy."""


class LinkRate(Struct, frozen=True):
    """Bytes a second, and how they were measured, for people; 0, and why they were not."""

    nbytes_per_s: float
    how: str


def host_rate(seconds: float = MEASURED_S) -> LinkRate:
    """One thread's memcpy from memory to memory, over `seconds` at least."""
    source, target = np.ones(BUFFER_NBYTES, np.uint8), np.ones(BUFFER_NBYTES, np.uint8)
    copied, start_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < seconds or not copied:
        np.copyto(target, source)
        copied += BUFFER_NBYTES
    return LinkRate(copied / max(elapsed_s, 1e-9), f"memcpy of {BUFFER_NBYTES >> 20} MiB for {elapsed_s:.2f} s")


def gpu_rate(ordinal: int, driver: Driver | None = None, seconds: float = MEASURED_S) -> LinkRate:
    """Copies of PIECE_NBYTES from pinned host memory to GPU number `ordinal`, over `seconds` at least; takes a context
    and BUFFER_NBYTES there for that long."""
    try:
        return _gpu_rate(ordinal, driver or load_driver(), seconds)
    except (CudaError, ConfigError) as error:
        return LinkRate(0.0, str(error))


def _gpu_rate(ordinal: int, driver: Driver, seconds: float) -> LinkRate:
    with ExitStack() as undo:
        gpu = Gpu(driver, driver.device(ordinal))
        undo.callback(gpu.close)
        gpu.enter()
        source = driver.allocate_host(BUFFER_NBYTES)
        undo.callback(driver.free_host, source)
        target = driver.allocate(BUFFER_NBYTES)
        undo.callback(driver.free, target)
        stream = driver.stream()
        undo.callback(driver.destroy_stream, stream)
        event = driver.event()
        undo.callback(driver.destroy_event, event)
        _fill(driver, source, target, stream, event)  # once in vain: the first copy of a context takes longer
        copied, start_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - start_s) < seconds or not copied:
            _fill(driver, source, target, stream, event)
            copied += BUFFER_NBYTES
    how = f"copies of {PIECE_NBYTES >> 20} MiB to cuda:{ordinal} for {elapsed_s:.2f} s"
    return LinkRate(copied / max(elapsed_s, 1e-9), how)


def _fill(driver: Driver, source: int, target: int, stream: object, event: object) -> None:
    """Copy the whole buffer and wait for it."""
    for offset in range(0, BUFFER_NBYTES, PIECE_NBYTES):
        driver.copy_to_device(target + offset, source + offset, PIECE_NBYTES, stream)
    driver.record(event, stream)
    while not driver.has_happened(event):
        pass  # a nap would last longer than what it waits for
