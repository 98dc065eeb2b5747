"""The copy loop: polls the workers' rings, copies what the arbiter allows, raises flags. A thread of its own.

Between records it naps ever longer; after `spin_us` without one, and only while no worker runs a step, it sleeps until
a Wake (ring.py says why no record can be lost). All of its state belongs to the thread: others hand it functions to
run between two records (`attach`, `detach`, `counters`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from copyengine.arbiter import Arbiter, Piece
from copyengine.device import FAILED, LANDED, Bytes, CopyDevice, Memory
from copyengine.protocol import CopyCounters
from copyengine.ring import KINDS, CopyQuery, Kind, Malformed, RingReader
from copyengine.sync import nap
from copyengine.wire.errors import CopyFailed, PeerDied

T = TypeVar("T")
log = logging.getLogger(__name__)


class Attachment(Struct, frozen=True):
    """One worker's memory and what is copied into it."""

    worker: str
    banks: list[Bytes]  # [L] of [E * record_nbytes] uint8
    record_nbytes: int
    pool: Memory
    flags: Memory
    ring: Memory
    reader: RingReader

    def close(self) -> None:
        """Unmap the worker's memory."""
        for memory in (self.pool, self.flags, self.ring):
            memory.close()


class CopierStats(Struct, frozen=True):
    """A snapshot: counters per kind, records that made no sense, who is attached, and whether rings are polled."""

    counters: dict[Kind, CopyCounters]
    malformed_records: int
    workers: list[str]
    asleep: bool


class Copier:
    """Copies for any number of workers until `stop`."""

    def __init__(self, device: CopyDevice, background_depth: int, spin_us: int, on_death: Callable[[], None]) -> None:
        """`on_death` is called from the thread if it ends by an error, which is a bug of ours."""
        self._device = device
        self._arbiter = Arbiter(background_depth)
        self._spin_s = spin_us / 1e6
        self._on_death = on_death
        self._attached: dict[str, Attachment] = {}
        self._issued: deque[tuple[Piece, Any]] = deque()
        self._counters: dict[Kind, CopyCounters] = {kind: CopyCounters() for kind in KINDS}
        self._malformed = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._asleep = False
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, if it was started, and unmap all workers' memory; queries not copied get FAILED flags."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def wake(self) -> None:
        """Poll the rings for at least `spin_us` from now on."""
        self._wake.set()

    def attach(self, attachment: Attachment) -> Future[None]:
        """Serve this worker, in place of one of the same name."""

        def attach() -> None:
            self._detach(attachment.worker)
            self._attached[attachment.worker] = attachment

        return self._call(attach)

    def detach(self, worker: str) -> Future[None]:
        """Forget this worker, if it is attached: drops its queries, unmaps its memory once no copy goes there."""
        return self._call(lambda: self._detach(worker))

    def stats(self) -> CopierStats:
        """The counters. From any thread; does not wake a sleeping copier."""
        return CopierStats(dict(self._counters), self._malformed, sorted(self._attached), self._asleep)

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            future.set_result(function())

        self._calls.append(call)
        self._wake.set()
        if not self._thread.is_alive() and not future.done():
            future.set_exception(PeerDied("the copy loop has ended"))
        return future

    # Below: the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
            for worker in list(self._attached):
                self._detach(worker)
        except Exception:
            log.exception("the copy loop failed")
            self._on_death()

    def _loop(self) -> None:
        last_work = time.monotonic()
        while not self._stopping:
            if self._wake.is_set():
                self._wake.clear()
                last_work = time.monotonic()
            while self._calls:
                self._calls.popleft()()
            if self._poll() | self._retire() | self._issue():
                last_work = time.monotonic()
                continue
            idle_s = time.monotonic() - last_work
            if idle_s < self._spin_s or self._issued or any(a.reader.step_runs() for a in self._attached.values()):
                nap(idle_s)
            else:
                self._sleep()

    def _sleep(self) -> None:
        """Sleep until a Wake, a call or the stop, unless a step has begun meanwhile."""
        readers = [attachment.reader for attachment in self._attached.values()]
        for reader in readers:
            reader.set_asleep(True)
        if not any(reader.step_runs() or reader.pending() for reader in readers):
            self._asleep = True
            self._wake.wait()
            self._asleep = False
        for reader in readers:
            reader.set_asleep(False)

    def _poll(self) -> bool:
        """Take what the rings hold."""
        found = False
        for worker, attachment in self._attached.items():
            while (record := attachment.reader.poll()) is not None:
                found = True
                if isinstance(record, CopyQuery):
                    self._arbiter.submit(worker, record)
                    self._count(record.kind, queries=1)
                else:
                    self._refuse(attachment, record)
        return found

    def _refuse(self, attachment: Attachment, record: Malformed) -> None:
        self._malformed += 1
        log.error("worker %s rang a malformed record: %s", attachment.worker, record.why)
        if record.flag is not None:
            self._device.write_flag("demand", attachment.flags, record.flag, FAILED)

    def _issue(self) -> bool:
        """Issue one piece, so that a demand query waits for no more than that."""
        piece = self._arbiter.next()
        if piece is None:
            return False
        try:
            self._issued.append((piece, self._copy(piece)))
        except CopyFailed as error:
            self._fail(piece, error)
        return True

    def _copy(self, piece: Piece) -> Any:
        attachment = self._attached[piece.worker]
        nbytes = attachment.record_nbytes
        token = None
        if piece.count:
            first = piece.first_expert * nbytes
            source = attachment.banks[piece.query.layer][first : first + piece.count * nbytes]
            token = self._device.copy(piece.stream, source, attachment.pool, piece.first_slot * nbytes)
            self._count(piece.query.kind, records=piece.count, nbytes=source.nbytes)
        if piece.last:
            self._device.write_flag(piece.stream, attachment.flags, piece.query.flag, LANDED)
        return token

    def _retire(self) -> bool:
        """Tell the arbiter of the pieces that are copied."""
        retired = False
        for _ in range(len(self._issued)):
            piece, token = self._issued.popleft()
            try:
                if token is None or self._device.is_done(token):
                    self._arbiter.completed(piece)
                    retired = True
                else:
                    self._issued.append((piece, token))
            except CopyFailed as error:
                self._fail(piece, error)
        return retired

    def _fail(self, piece: Piece, error: CopyFailed) -> None:
        log.error("a copy for worker %s, layer %d failed: %s", piece.worker, piece.query.layer, error)
        self._arbiter.completed(piece)
        self._arbiter.drop(piece.query)
        self._count(piece.query.kind, failed_queries=1)
        self._device.write_flag(piece.stream, self._attached[piece.worker].flags, piece.query.flag, FAILED)

    def _detach(self, worker: str) -> None:
        attachment = self._attached.get(worker)
        if attachment is None:
            return
        dropped = self._arbiter.drop_worker(worker)
        waited_since = time.monotonic()
        while self._arbiter.in_flight(worker):
            if not self._retire():
                nap(time.monotonic() - waited_since)
        for query in dropped:
            self._device.write_flag("demand", attachment.flags, query.flag, FAILED)
        del self._attached[worker]
        attachment.close()

    def _count(self, kind: Kind, queries: int = 0, records: int = 0, nbytes: int = 0, failed_queries: int = 0) -> None:
        old = self._counters[kind]
        self._counters[kind] = replace(
            old,
            queries=old.queries + queries,
            records=old.records + records,
            nbytes=old.nbytes + nbytes,
            failed_queries=old.failed_queries + failed_queries,
        )
