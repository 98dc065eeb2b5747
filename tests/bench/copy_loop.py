"""What the copy loop itself takes from a record in the ring to the first copy and to the flag, with or without a GPU.

The loop's own functions, one after the other in this thread: a real one would be on another core. Part of bench_copies.
"""

import statistics
import time
from collections.abc import Sequence

import numpy as np

from copyengine.copier import Attachment, Copier
from copyengine.device import Bank, CopyDevice, Memory, Run, Stream
from copyengine.device.host import HostCopyDevice, HostWorkerDevice, create_segment
from copyengine.ring import CopyQuery, Limits, RingReader, RingWriter, ring_nbytes
from tests.copyengine.array_bank import ArrayBank

QUERIES = (1, 3, 10, 32, 128)
SLOTS = 512


class Nothing(HostCopyDevice):
    """Copies nothing and is at once through with it."""

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        pass

    def mark(self, stream: Stream, target: Memory) -> object:  # type: ignore[override]
        return self

    def write_flag(self, stream: Stream, flags: Memory, index: int, value: int) -> None:
        pass


class Timed:
    """A device that notes when it was first asked for a copy, and when it was through with a flag."""

    def __init__(self, device: CopyDevice) -> None:
        self._device = device
        self.copy_at = self.flag_at = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        """See CopyDevice."""
        self.copy_at = time.perf_counter()
        self._device.copy(stream, source, target, runs)

    def write_flag(self, stream: Stream, flags: Memory, index: int, value: int) -> None:
        """See CopyDevice."""
        self._device.write_flag(stream, flags, index, value)
        self.flag_at = time.perf_counter()


def rows_without_device() -> list[tuple[str, ...]]:
    """Of copy_loop_rows, for a device that takes no time."""
    host = HostWorkerDevice()
    pool, flags = host.allocate("bench", "pool", SLOTS * 128), host.allocate("bench", "flags", 4)
    found = copy_loop_rows(Nothing(), ArrayBank(np.zeros(SLOTS * 128, np.uint8)), pool, flags, 128)
    for memory in (pool, flags):
        memory.close()
    return found


def copy_loop_rows(
    device: CopyDevice, bank: Bank, pool: Memory, flags: Memory, record_nbytes: int, repeats: int = 400
) -> list[tuple[str, ...]]:
    """(records, layout, µs to the first copy call, µs until the flag's write is queued, µs per further record)."""
    timed = Timed(device)
    ring = create_segment("bench", "ring", ring_nbytes(64))
    writer = RingWriter(ring.array, 64)
    reader = RingReader(ring.array, Limits(1, SLOTS, SLOTS, 1))
    copier = Copier(timed, background_depth=2, spin_us=0, on_death=lambda: None)  # type: ignore[arg-type]
    copier._attached["w"] = Attachment("w", [bank], record_nbytes, pool, flags, ring, reader)
    copier._share_links()
    rows: list[tuple[str, ...]] = []
    one_us: dict[str, float] = {}
    for n in QUERIES:
        for where, step in (("scattered", 2), ("neighbouring", 1)):
            experts = tuple(range(0, n * step, step))
            query = CopyQuery(0, "demand", 0, experts, experts)
            first_us, flag_us = _times(copier, timed, writer, query, repeats)
            one_us.setdefault(where, flag_us)
            more = f"{(flag_us - one_us[where]) / (n - 1):.2f}" if n > 1 else ""
            rows.append((str(n), where, f"{first_us:.1f}", f"{flag_us:.1f}", more))
    ring.close()
    return rows


def _times(copier: Copier, timed: Timed, writer: RingWriter, query: CopyQuery, repeats: int) -> tuple[float, float]:
    """Medians in µs: from the record to the first copy, and to the end of the flag's write."""
    first_us, flag_us = [], []
    for _ in range(repeats):
        assert writer.try_put(query)
        timed.flag_at = 0.0
        start = time.perf_counter()
        while not timed.flag_at:
            copier._poll()
            copier._issue()
        first_us.append((timed.copy_at - start) * 1e6)
        flag_us.append((timed.flag_at - start) * 1e6)
        while copier._arbiter.in_flight("w"):
            copier._retire()
    return statistics.median(first_us), statistics.median(flag_us)


def idle_loop_us() -> float:
    """What one round of the loop takes that finds nothing, beside the pause."""
    ring = create_segment("bench", "ring", ring_nbytes(64))
    RingWriter(ring.array, 64)
    flags = HostWorkerDevice().allocate("bench", "flags", 4)
    copier = Copier(Nothing(), background_depth=2, spin_us=0, on_death=lambda: None)
    reader = RingReader(ring.array, Limits(1, 1, 1, 1))
    copier._attached["w"] = Attachment("w", [], 1, flags, flags, ring, reader)
    start = time.perf_counter()
    rounds = 20_000
    for _ in range(rounds):
        copier._answer_calls()
        copier._poll()
        copier._issue()
        copier._retire()
    round_us = (time.perf_counter() - start) / rounds * 1e6
    ring.close()
    flags.close()
    return round_us
