"""The copy loop against memory in this process: what lands, what is counted, when it sleeps, how it ends.

Whole steps of a worker over it are in tests/worker/test_host_slots.py.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from copyengine.copier import Attachment, Copier
from copyengine.device import FAILED, LANDED, STREAMS, Bank, Memory, Run, Stream
from copyengine.device.host import HostCopyDevice, HostWorkerDevice, create_segment
from copyengine.protocol import CopyCounters
from copyengine.ring import CELLS, KINDS, CopyQuery, Kind, Limits, RingReader, RingWriter, ring_nbytes
from copyengine.wire.errors import CopyFailed, PeerDied
from tests.copyengine.array_bank import ArrayBank

EXPERTS, SLOTS, RECORD = 6, 8, 64


class Device(HostCopyDevice):
    """Records what is copied; `token` is what a mark returns, `done` says when it is over."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []
        self.runs: list[int] = []  # of each copy
        self.done: Callable[[], bool] = lambda: True
        self.token: Any = None

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        self.runs.append(len(runs))
        for run in runs:
            refuse(source, run)
            super().copy(stream, source, target, [run])
            self.order.append(int(source.array[run.source_offset]))

    def mark(self, stream: Stream, target: Memory) -> Any:
        return self.token

    def is_done(self, token: Any) -> bool:
        return self.done()


def refuse(source: Bank, run: Run) -> None:
    """A record of the value 255 cannot be copied."""
    if 255 in source.array[run.source_offset : run.source_offset + run.nbytes]:
        raise CopyFailed("told to")


class Copy:
    """One run on one of the streams below."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run


class Mark:
    """What a stream was given up to here."""

    def __init__(self) -> None:
        self.done = self.failed = False


class StreamsDevice(HostCopyDevice):
    """Copies wait in a queue per stream until the test completes them, and all that is given behind them waits with
    them, as device/__init__.py says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.queues: dict[Stream, list[Copy | Mark | Callable[[], None]]] = {stream: [] for stream in STREAMS}
        self.started: list[int] = []  # the first record of each run
        self.written: list[tuple[int, int]] = []  # flag and value

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        for run in runs:
            refuse(source, run)
            with self.lock:
                self.started.append(int(source.array[run.source_offset]))
                copy = Copy(lambda run=run: HostCopyDevice.copy(self, stream, source, target, [run]))  # type: ignore[misc]
                self.queues[stream].append(copy)

    def write_flag(self, stream: Stream, flags: Memory, index: int, value: int) -> None:
        def write() -> None:
            self.written.append((index, value))
            HostCopyDevice.write_flag(self, stream, flags, index, value)

        with self.lock:
            self.queues[stream].append(write)
            self._go_on(stream)

    def mark(self, stream: Stream, target: Memory) -> Any:
        mark = Mark()
        with self.lock:
            self.queues[stream].append(mark)
            self._go_on(stream)
        return mark

    def is_done(self, token: Mark) -> bool:  # type: ignore[override]
        if token.failed:
            raise CopyFailed("on the way")
        return token.done

    def complete(self, stream: Stream) -> None:
        """The first run of the stream is copied."""
        with self.lock:
            copy = self.queues[stream].pop(0)
            assert isinstance(copy, Copy)
            copy.run()
            self._go_on(stream)

    def fail(self, stream: Stream) -> None:
        """The first run of the stream fails, and all that it was given behind it."""
        with self.lock:
            given, self.queues[stream] = self.queues[stream], []
            for one in given:
                if isinstance(one, Mark):
                    one.failed = True

    def _go_on(self, stream: Stream) -> None:
        queue = self.queues[stream]
        while queue and not isinstance(queue[0], Copy):
            given = queue.pop(0)
            if isinstance(given, Mark):
                given.done = True
            else:
                given()  # type: ignore[operator]


class Worker:
    """The other end, by hand. Record e of the bank is all e, except that reading expert 5 fails."""

    def __init__(self, name: str = "w") -> None:
        device = HostWorkerDevice()
        self.pool = device.allocate("test", "pool", SLOTS * RECORD)
        self.flags = device.allocate("test", "flags", 4 * 16)
        self.ring = create_segment("test", "ring", ring_nbytes(16))
        self.writer = RingWriter(self.ring.array, 16)
        bank = np.repeat(np.array([0, 1, 2, 3, 4, 255], np.uint8), RECORD)
        reader = RingReader(self.ring.array, Limits(1, EXPERTS, SLOTS, 16))
        self.attachment = Attachment(name, [ArrayBank(bank)], RECORD, self.pool, self.flags, self.ring, reader)

    def put(self, flag: int, kind: Kind, experts: tuple[int, ...], slots: tuple[int, ...] | None = None) -> None:
        assert self.writer.try_put(CopyQuery(flag, kind, 0, experts, slots or experts))

    def flag(self, index: int) -> int:
        return int(self.flags.array.view(np.uint32)[index])

    def close(self) -> None:
        self.attachment.close()


def until(condition: Callable[[], bool], within_s: float = 10) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.001)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def copier(device: Device) -> Iterator[Copier]:
    copier = Copier(device, background_depth=2, spin_us=1000, on_death=lambda: None)
    copier.start()
    yield copier
    copier.stop()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def test_what_was_rung_before_it_attached_is_copied_and_counted(copier: Copier, device: Device, worker: Worker) -> None:
    """One query of each kind; slots and counters by hand. Demand first, whatever came first."""
    worker.put(0, "stream", (0, 1))
    worker.put(1, "prefetch", (2,), (7,))
    worker.put(2, "demand", (3, 4))
    worker.put(3, "demand", ())
    copier.attach(worker.attachment).result(10)
    until(lambda: all(worker.flag(i) == LANDED for i in range(4)))
    pool = worker.pool.array.reshape(SLOTS, RECORD)
    assert [set(row) for row in pool[[0, 1, 7, 3, 4]].tolist()] == [{0}, {1}, {2}, {3}, {4}]
    assert not pool[[2, 5, 6]].any()
    assert device.order == [3, 0, 1, 2]  # 3 and 4 are neighbours: one copy
    stats = copier.stats()
    assert stats.workers == ["w"] and stats.malformed_records == 0
    assert stats.counters == {
        "demand": CopyCounters(2, 2, 2 * RECORD, 0),
        "stream": CopyCounters(1, 2, 2 * RECORD, 0),
        "prefetch": CopyCounters(1, 1, RECORD, 0),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_copy_fails_its_query_alone(copier: Copier, worker: Worker, kind: Kind) -> None:
    worker.put(0, kind, (5, 1, 2))
    worker.put(1, kind, (1,))
    copier.attach(worker.attachment).result(10)
    until(lambda: worker.flag(0) == FAILED and worker.flag(1) == LANDED)
    assert copier.stats().counters[kind] == CopyCounters(2, 1, RECORD, 1)


def test_a_malformed_record_fails_its_flag_and_is_counted(copier: Copier, worker: Worker) -> None:
    worker.put(6, "demand", (1,))
    worker.ring.array.view(np.uint32)[CELLS + 3] = 9  # the layer
    worker.put(7, "demand", (2,))
    copier.attach(worker.attachment).result(10)
    until(lambda: worker.flag(6) == FAILED and worker.flag(7) == LANDED)
    assert copier.stats().malformed_records == 1


def test_copies_that_take_time_hold_background_back(copier: Copier, device: Device, worker: Worker) -> None:
    """A device whose copies stay in flight: two background pieces go out, the rest when those are over."""
    device.token, device.done = "in flight", lambda: False
    worker.put(0, "stream", (0, 1, 2, 3))
    copier.attach(worker.attachment).result(10)
    until(lambda: device.order == [0, 1])
    worker.put(1, "demand", (4,))
    until(lambda: device.order == [0, 1, 4])
    time.sleep(0.02)
    assert device.order == [0, 1, 4]
    device.done = lambda: True
    until(lambda: worker.flag(0) == LANDED)
    assert device.order == [0, 1, 4, 2, 3]


def test_a_copy_that_fails_in_flight_fails_its_query(copier: Copier, device: Device, worker: Worker) -> None:
    def fail() -> bool:
        raise CopyFailed("on the way")

    device.token, device.done = "in flight", fail
    worker.put(0, "stream", (0, 1, 2, 3))
    copier.attach(worker.attachment).result(10)
    until(lambda: worker.flag(0) == FAILED)
    time.sleep(0.01)
    assert copier.stats().counters["stream"] == CopyCounters(1, 0, 0, 1)


@pytest.fixture
def streams(worker: Worker) -> Iterator[tuple[StreamsDevice, Copier]]:
    """A copier on streams, with `worker` attached."""
    device = StreamsDevice()
    copier = Copier(device, background_depth=2, spin_us=1000, on_death=lambda: None)
    copier.start()
    copier.attach(worker.attachment).result(10)
    yield device, copier
    while any(device.queues.values()):
        for stream in ("demand", "background"):
            device.fail(stream)
    copier.stop()


Streams = tuple[StreamsDevice, Copier]


def ring(copier: Copier, worker: Worker, flag: int, kind: Kind, experts: tuple[int, ...]) -> None:
    worker.put(flag, kind, experts)
    copier.wake()


def test_on_streams_a_flag_lands_behind_the_last_run_and_all_that_is_on_the_way_is_counted(
    streams: Streams, worker: Worker
) -> None:
    """A demand query of three runs goes out at once; its records count before its flag can be seen."""
    device, copier = streams
    ring(copier, worker, 0, "demand", (0, 2, 4))
    until(lambda: device.started == [0, 2, 4])
    for _ in range(2):
        device.complete("demand")
        time.sleep(0.01)
        assert worker.flag(0) == 0
    device.complete("demand")
    assert worker.flag(0) == LANDED
    assert copier.stats().counters["demand"] == CopyCounters(1, 3, 3 * RECORD, 0)


def test_on_streams_a_failure_fails_its_query_once_and_never_lands(streams: Streams, worker: Worker) -> None:
    """The second run of three fails when the third and the flag's write are on their way behind it."""
    device, copier = streams
    ring(copier, worker, 0, "demand", (0, 2, 4))
    until(lambda: device.started == [0, 2, 4])
    device.complete("demand")
    until(lambda: marked(device, "demand", 1))
    device.fail("demand")
    until(lambda: worker.flag(0) == FAILED)
    ring(copier, worker, 1, "demand", (1,))
    until(lambda: device.started == [0, 2, 4, 1])
    until(lambda: marked(device, "demand", 1))
    device.complete("demand")
    until(lambda: device.written == [(0, FAILED), (1, LANDED)])
    assert copier.stats().counters["demand"] == CopyCounters(2, 1, RECORD, 1)


def test_on_streams_what_was_started_of_a_query_ends_before_its_flag_says_failed(
    streams: Streams, worker: Worker
) -> None:
    """The third run cannot be started while the first two are on the way."""
    device, copier = streams
    ring(copier, worker, 0, "demand", (0, 2, 5, 4))
    until(lambda: copier.stats().counters["demand"].failed_queries == 1)
    assert device.started == [0, 2]
    for _ in range(2):
        assert device.written == []
        device.complete("demand")
    assert device.written == [(0, FAILED)]
    assert copier.stats().counters["demand"] == CopyCounters(1, 0, 0, 1)


def test_on_streams_failed_is_written_after_the_last_piece_in_flight(streams: Streams, worker: Worker) -> None:
    """The third piece of four cannot be started while the second is in flight: the slots are not free before that."""
    device, copier = streams
    ring(copier, worker, 0, "stream", (0, 1, 5, 4))
    until(lambda: device.started == [0, 1] and marked(device, "background", 2))
    device.complete("background")
    time.sleep(0.02)
    assert device.written == [] and device.started == [0, 1]
    device.complete("background")
    until(lambda: device.written == [(0, FAILED)])
    time.sleep(0.01)
    assert device.started == [0, 1] and copier.stats().counters["stream"] == CopyCounters(1, 2, 2 * RECORD, 1)


def marked(device: StreamsDevice, stream: Stream, marks: int) -> bool:
    """The copier has done with what it gives a stream for so many pieces."""
    with device.lock:
        return sum(isinstance(given, Mark) for given in device.queues[stream]) == marks


def test_a_stream_piece_is_a_query_where_a_worker_has_its_link_for_itself(copier: Copier, device: Device) -> None:
    """While two workers share a link, on the host, and where banks are not all pinned, pieces have one record. Prefetch
    pieces always have one."""
    a, b, c, d = (on_a_link(Worker(name), link) for name, link in [("a", "x"), ("b", "x"), ("c", "y"), ("d", "")])

    def runs(worker: Worker, kind: Kind) -> list[int]:
        """Of the pieces of three records that are no neighbours."""
        device.runs.clear()
        worker.flags.array[:] = 0
        ring(copier, worker, 0, kind, (0, 2, 4))
        until(lambda: worker.flag(0) == LANDED)
        return list(device.runs)

    for worker in (a, c, d):
        copier.attach(worker.attachment).result(10)
    assert [runs(worker, "stream") for worker in (a, c, d)] == [[3], [3], [1, 1, 1]]
    assert [runs(a, "prefetch"), runs(a, "demand")] == [[1, 1, 1], [3]]
    copier.attach(b.attachment).result(10)
    assert [runs(worker, "stream") for worker in (a, b, c)] == [[1, 1, 1], [1, 1, 1], [3]]
    copier.detach("a").result(10)
    assert runs(b, "stream") == [3]
    bank = b.attachment.banks[-1]
    assert isinstance(bank, ArrayBank)
    bank.pageable_nbytes = 1
    copier.attach(a.attachment).result(10)
    copier.detach("a").result(10)
    assert [runs(b, "stream"), runs(b, "demand"), runs(c, "stream")] == [[1, 1, 1], [3], [3]]
    for worker in (a, b, c, d):
        worker.close()


def on_a_link(worker: Worker, link: str) -> Worker:
    """As if its pool lay on a device that `link` leads to."""
    worker.pool.handle = replace(worker.pool.handle, device=link)  # type: ignore[misc]
    return worker


def test_sleeps_when_idle_and_wakes_for_wake_and_for_a_step(copier: Copier, worker: Worker) -> None:
    copier.attach(worker.attachment).result(10)
    until(lambda: copier.stats().asleep)
    assert worker.writer.begin_step()  # it must be woken
    worker.put(0, "demand", (1,))
    time.sleep(0.02)
    assert worker.flag(0) == 0
    copier.wake()
    until(lambda: worker.flag(0) == LANDED)
    time.sleep(0.05)
    assert not copier.stats().asleep  # the step goes on
    worker.put(1, "demand", (1,))
    until(lambda: worker.flag(1) == LANDED)
    worker.writer.end_step()
    until(lambda: copier.stats().asleep)
    copier.wake()
    until(lambda: copier.stats().asleep)


@pytest.mark.parametrize("step_spin_us", [0, 10**9])
def test_naps_between_records_only_where_it_may(
    device: Device, worker: Worker, monkeypatch: pytest.MonkeyPatch, step_spin_us: int
) -> None:
    """While a step runs; it is over before the copier has been without work for so long."""
    naps: list[float] = []
    yields: list[float] = []

    def nap(waited_s: float) -> None:
        naps.append(waited_s)
        time.sleep(0.001)

    monkeypatch.setattr("copyengine.copier.nap", nap)
    monkeypatch.setattr("copyengine.copier.yield_core", lambda: yields.append(0))
    copier = Copier(device, 2, 1000, lambda: None, step_spin_us)
    worker.writer.begin_step()
    copier.start()
    copier.attach(worker.attachment).result(10)
    for flag in range(3):
        worker.put(flag, "demand", (1,))
        until(lambda flag=flag: worker.flag(flag) == LANDED)  # type: ignore[misc]
        until(lambda: bool(naps or yields))
    assert bool(naps) == (step_spin_us == 0) and bool(yields) != bool(naps)
    copier.stop()


def test_detach_waits_for_what_is_in_flight_and_fails_the_rest(copier: Copier, device: Device, worker: Worker) -> None:
    device.token, device.done = "in flight", lambda: False
    worker.put(0, "stream", (0, 1, 2, 3))
    worker.put(1, "stream", (1,))
    copier.attach(worker.attachment).result(10)
    until(lambda: len(device.order) == 2)
    flags = worker.flags.array.view(np.uint32)
    detached = copier.detach("w")
    time.sleep(0.02)
    assert not detached.done()
    device.done = lambda: True
    detached.result(10)
    assert flags[:2].tolist() == [FAILED, FAILED] and device.order == [0, 1]
    assert copier.stats().workers == [] and worker.pool.array.size == 0
    copier.detach("w").result(10)  # again: nothing happens


def blocked(device: Device, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """`device.copy` sets the first event and waits for the second."""
    inside, gate = threading.Event(), threading.Event()
    copy = device.copy

    def wait(*arguments: Any) -> Any:
        inside.set()
        assert gate.wait(10)
        return copy(*arguments)

    monkeypatch.setattr(device, "copy", wait)
    return inside, gate


@pytest.mark.parametrize("how", ["detach", "stop"])
def test_what_lies_unread_in_the_ring_fails_at_detach_and_at_stop(
    copier: Copier, device: Device, worker: Worker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The copier is held up inside a copy while more is rung: it reads it only because the worker is parted from."""
    inside, gate = blocked(device, monkeypatch)
    flags = worker.flags.array.view(np.uint32)
    worker.put(0, "demand", (0,))
    copier.attach(worker.attachment).result(10)
    assert inside.wait(10)
    worker.put(1, "demand", (1,))
    worker.put(2, "stream", (2, 3))
    if how == "detach":
        parted = copier.detach("w")
        gate.set()
        parted.result(10)
    else:
        threading.Timer(0.05, gate.set).start()
        assert copier.stop()
    assert flags[:3].tolist() == [LANDED, FAILED, FAILED]
    assert worker.pool.array.size == 0


def test_a_copy_that_never_ends_holds_up_a_detach_for_a_while_only(
    copier: Copier, device: Device, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its memory stays mapped: the copy may go on. When it ends after all, its query's flag is still told."""
    monkeypatch.setattr("copyengine.copier.DETACH_S", 0.05)
    device.token, device.done = "in flight", lambda: False
    worker.put(0, "stream", (0, 1, 2))
    copier.attach(worker.attachment).result(10)
    until(lambda: device.order == [0, 1])
    copier.detach("w").result(10)
    assert copier.stats().workers == [] and worker.pool.array.size and "stays mapped" in caplog.text
    device.done = lambda: True
    copier.wake()
    until(lambda: worker.flag(0) == FAILED)


def test_a_demand_query_is_issued_before_the_next_record_is_read(
    copier: Copier, device: Device, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lie in the ring: when the first is copied the second is still there, when the second is, none."""
    pending: list[bool] = []
    copy = device.copy

    def look(*arguments: Any) -> None:
        pending.append(worker.attachment.reader.pending())
        copy(*arguments)

    monkeypatch.setattr(device, "copy", look)
    worker.put(0, "stream", (4,))
    worker.put(1, "demand", (1,))
    worker.put(2, "demand", (2,))
    copier.attach(worker.attachment).result(10)
    until(lambda: all(worker.flag(i) == LANDED for i in range(3)))
    assert device.order == [1, 2, 4] and pending == [True, False, False]


def test_a_flag_that_waits_behind_another_workers_copies_is_waited_for_by_a_detach(
    streams: Streams, worker: Worker
) -> None:
    """Two records of one worker are in flight on the stream on which the other one's flag says that it failed."""
    device, copier = streams
    other = Worker("other")
    copier.attach(other.attachment).result(10)
    ring(copier, other, 0, "stream", (0, 1))
    until(lambda: marked(device, "background", 2))
    flags = worker.flags.array.view(np.uint32)
    ring(copier, worker, 0, "stream", (3,))
    detached = copier.detach("w")
    time.sleep(0.02)
    assert not detached.done() and flags[0] == 0
    for _ in range(2):
        device.complete("background")
    detached.result(10)
    assert flags[0] == FAILED and other.flag(0) == LANDED
    copier.detach("other").result(10)


def test_stop_does_not_wait_for_a_stuck_copy(
    copier: Copier, device: Device, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("copyengine.copier.STOP_S", 0.05)
    inside, gate = blocked(device, monkeypatch)
    worker.put(0, "demand", (0,))
    copier.attach(worker.attachment).result(10)
    assert inside.wait(10)
    assert not copier.stop()
    gate.set()
    until(copier.stop)


@pytest.mark.parametrize("before", ["attached", "detached"])
def test_stop_says_that_copies_are_in_flight(
    copier: Copier, device: Device, worker: Worker, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Those of two workers, which the thread waits for together, or of one that was detached without them: it ends on
    its own, and the banks may be freed all the same only once they are over."""
    monkeypatch.setattr("copyengine.copier.STOP_S", 0.1)
    monkeypatch.setattr("copyengine.copier.DETACH_S", 0.01 if before == "detached" else 1000)
    other = Worker("other")
    device.token, device.done = "in flight", lambda: False
    for one in (worker, other):
        one.put(0, "demand", (0,))
        copier.attach(one.attachment).result(10)
    until(lambda: len(device.order) == 2)
    if before == "detached":
        for name in ("w", "other"):
            copier.detach(name).result(10)
    assert not copier.stop()
    copier._thread.join(10)
    assert not copier._thread.is_alive() and not copier.stop()
    other.close()


def test_stop_waits_for_copies_of_workers_that_are_detached(
    copier: Copier, device: Device, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("copyengine.copier.DETACH_S", 0.01)
    device.token, device.done = "in flight", lambda: False
    worker.put(0, "demand", (0,))
    copier.attach(worker.attachment).result(10)
    until(lambda: device.order == [0])
    copier.detach("w").result(10)
    threading.Timer(0.05, lambda: setattr(device, "done", lambda: True)).start()
    assert copier.stop()


def test_a_second_attach_replaces_the_first(copier: Copier, worker: Worker) -> None:
    second = Worker()
    copier.attach(worker.attachment).result(10)
    copier.attach(second.attachment).result(10)
    assert worker.pool.array.size == 0 and copier.stats().workers == ["w"]
    second.put(0, "demand", (1,))
    copier.wake()
    until(lambda: second.flag(0) == LANDED)


def test_a_dead_worker_is_dropped_but_not_who_came_in_its_place(copier: Copier, worker: Worker) -> None:
    second = Worker()
    copier.attach(worker.attachment).result(10)
    copier.attach(second.attachment).result(10)
    copier.drop(worker.attachment).result(10)
    assert copier.stats().workers == ["w"] and second.pool.array.size
    copier.drop(second.attachment).result(10)
    assert copier.stats().workers == [] and second.pool.array.size == 0


def test_two_workers_share_it(copier: Copier, worker: Worker) -> None:
    other = Worker("other")
    for one in (worker, other):
        one.put(0, "stream", (0, 1, 2, 3, 4))
        one.put(1, "demand", (3,))
        copier.attach(one.attachment).result(10)
    until(lambda: all(one.flag(i) == LANDED for one in (worker, other) for i in (0, 1)))
    assert copier.stats().workers == ["other", "w"]
    copier.detach("other").result(10)


def test_stop_fails_what_was_not_copied(device: Device, worker: Worker) -> None:
    copier = Copier(device, background_depth=1, spin_us=0, on_death=lambda: None)
    copier.start()
    device.token, device.done = "in flight", lambda: False
    worker.put(0, "stream", (0, 1, 2))
    flags = worker.flags.array.view(np.uint32)
    copier.attach(worker.attachment).result(10)
    until(lambda: len(device.order) == 1)
    threading.Timer(0.05, lambda: setattr(device, "done", lambda: True)).start()
    copier.stop()
    assert flags[0] == FAILED and copier.stats().workers == []
    with pytest.raises(PeerDied):
        copier.detach("w").result(1)


def test_a_bug_in_the_loop_is_told(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """A device that raises what it may not: the thread ends, loudly."""

    class Broken(Device):
        def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
            raise ZeroDivisionError("a bug")

    dead = threading.Event()
    copier = Copier(Broken(), background_depth=1, spin_us=0, on_death=dead.set)
    copier.start()
    worker.put(0, "demand", (0,))
    copier.attach(worker.attachment).result(10)
    assert dead.wait(10) and "event=copy_loop_failed" in caplog.text
    assert not copier.stop()  # nobody knows what is in flight


def test_a_worker_on_the_host_knows_how_long_a_query_took_when_its_flag_is_up(
    copier: Copier, device: Device, worker: Worker
) -> None:
    """Of one that failed too; of prefetch, for which no step waits, nothing."""
    took_us: list[int] = []

    def write_flag(stream: Stream, flags: Memory, index: int, value: int) -> None:
        took_us.append(worker.writer.busy_us())
        HostCopyDevice.write_flag(device, stream, flags, index, value)

    device.write_flag = write_flag  # type: ignore[method-assign]
    copier.attach(worker.attachment).result(10)
    worker.writer.begin_step()  # it does not sleep meanwhile
    copier.wake()
    start_s = time.monotonic()
    queries: tuple[tuple[Kind, int], ...] = (
        ("demand", 3),
        ("stream", 3),
        ("prefetch", 3),
        ("stream", 5),
        ("demand", 5),
    )
    for flag, (kind, expert) in enumerate(queries):
        worker.put(flag, kind, (1, expert), (1, expert))
        until(lambda flag=flag: worker.flag(flag) == (LANDED if flag < 3 else FAILED))  # type: ignore[misc]
    assert [us > 0 for us in took_us] == [True, True, False, True, True]
    assert sum(took_us) <= (time.monotonic() - start_s) * 1e6


def test_copies_in_flight_count_until_they_have_landed_and_once(copier: Copier, device: Device, worker: Worker) -> None:
    in_flight = [True]
    device.token, device.done = "in flight", lambda: not in_flight[0]
    copier.attach(on_a_link(worker, "gpu").attachment).result(10)
    worker.writer.begin_step()  # it does not sleep meanwhile
    copier.wake()
    start_s = time.monotonic()
    worker.put(0, "demand", (1,))
    until(lambda: device.order == [1])
    time.sleep(0.05)
    worker.put(1, "demand", (2,))
    until(lambda: device.order == [1, 2])
    time.sleep(0.05)
    assert worker.writer.busy_us() == 0 and worker.flag(1) == LANDED, "the flags of this device are up at once"
    in_flight[0] = False
    took_us: list[int] = []

    def told() -> bool:
        took_us.append(worker.writer.busy_us())
        return took_us[-1] > 0

    until(told)
    assert 100_000 <= took_us[-1] <= (time.monotonic() - start_s) * 1e6
