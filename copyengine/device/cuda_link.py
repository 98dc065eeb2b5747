"""What copies to one GPU share: its two streams, and how runs of a bank become calls of the driver."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from copyengine.device import STREAMS, Run, Stream
from copyengine.device.cuda_gpu import Gpu
from copyengine.device.pinned import PinnedBank
from copyengine.device.staging import Staging

BATCH_RUNS = 4
"""From this many runs on, all but the first are one call: scattered records of 2.8 MB went at 48.7 GB/s in batches of 8
and at 52.1 in batches of 128, at 47.1 and 51.1 one by one (H200, 2026-11, tests/bench/results). The first goes alone,
so that the link has work while the lists for the call are made, 2.4 µs of Python each."""

BATCH_RUN_NBYTES = 256 << 10
"""Shorter runs beside longer ones make a batch wait for its own end, silently."""


class Link:
    """A GPU, its two streams, and events that are not in use. What copies must be called in its context."""

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

    def copy(self, stream: Stream, start: int, to: int, runs: Sequence[Run]) -> None:
        """Start copies between addresses, the first of pinned memory. CudaError if one cannot be started."""
        on, driver = self.streams[stream], self.gpu.driver
        if len(runs) >= BATCH_RUNS and driver.has_batches and min(run.nbytes for run in runs) >= BATCH_RUN_NBYTES:
            first, *rest = runs
            driver.copy_to_device(to + first.target_offset, start + first.source_offset, first.nbytes, on)
            driver.copy_batch_to_device(
                [to + run.target_offset for run in rest],
                [start + run.source_offset for run in rest],
                [run.nbytes for run in rest],
                on,
            )
        else:
            copy = driver.copy_to_device
            for run in runs:
                copy(to + run.target_offset, start + run.source_offset, run.nbytes, on)

    def copy_piecewise(self, stream: Stream, bank: PinnedBank, to: int, run: Run, staging: Staging | None) -> None:
        """Start copies of each registration's part by itself, and of what lies behind the last through `staging`.

        Without that the driver stages what is pageable, in the order of the stream like any other copy.
        """
        on, offset, end = self.streams[stream], run.source_offset, run.source_offset + run.nbytes
        for stop in (*(stop for stop in bank.ends if offset < stop < end), end):
            at = to + run.target_offset + offset - run.source_offset
            if stop <= bank.pinned_nbytes or staging is None:
                self.gpu.driver.copy_to_device(at, bank.address + offset, stop - offset, on)
            else:
                staging.send(bank.array[offset:stop], at, on, self.events)
            offset = stop

    def close(self) -> None:
        """Free all of it and leave the GPU."""
        self.gpu.enter()
        for event in self.events:
            self.gpu.driver.destroy_event(event)
        self._close.close()
