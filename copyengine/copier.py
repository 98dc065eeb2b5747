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
from copyengine.device import FAILED, LANDED, Bytes, CopyDevice, Memory, Stream
from copyengine.protocol import CopyCounters
from copyengine.ring import KINDS, CopyQuery, Kind, Malformed, RingReader
from copyengine.sync import nap
from copyengine.wire.errors import CopyFailed, PeerDied

T = TypeVar("T")
DETACH_S = 2.0
"""Seconds that a worker's copies in flight may take to end before it is detached without them."""

STOP_S = 4.0
"""Seconds that `stop` waits for the thread. The process ends without it."""

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
        self._issued: deque[tuple[Piece, Attachment, Any]] = deque()
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

    def stop(self) -> bool:
        """End the thread, if it was started, and unmap all workers' memory; queries not copied get FAILED flags.

        That includes what lies in the rings unread. False if the thread has not ended STOP_S later.
        """
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        return not self._thread.is_alive()

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
        """Forget this worker, if it is attached: its queries not copied, the unread ones in its ring too, get FAILED
        flags; its memory is unmapped once no copy goes there."""
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
            self._answer_calls()
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
            self._answer_calls()
            if self._poll() | self._retire() | self._issue():
                last_work = time.monotonic()
                continue
            idle_s = time.monotonic() - last_work
            if idle_s < self._spin_s or self._issued or any(a.reader.step_runs() for a in self._attached.values()):
                nap(idle_s)
            else:
                self._sleep()

    def _answer_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

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
        for attachment in self._attached.values():
            found |= self._take(attachment)
        return found

    def _take(self, attachment: Attachment) -> bool:
        """Take what one ring holds."""
        found = False
        while (record := attachment.reader.poll()) is not None:
            found = True
            if isinstance(record, CopyQuery):
                self._arbiter.submit(attachment.worker, record)
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
        attachment = self._attached[piece.worker]
        try:
            token = self._start(piece, attachment)
        except CopyFailed as error:
            self._complete(piece, attachment, error)
            return True
        if token is None:
            self._complete(piece, attachment)
        else:
            self._issued.append((piece, attachment, token))
        if piece.last:
            self._device.write_flag(piece.stream, attachment.flags, piece.query.flag, LANDED)
        return True

    def _start(self, piece: Piece, attachment: Attachment) -> Any:
        """The device's token; None if there is nothing to wait for."""
        if not piece.count:
            return None
        nbytes = attachment.record_nbytes
        first = piece.first_expert * nbytes
        source = attachment.banks[piece.query.layer][first : first + piece.count * nbytes]
        return self._device.copy(piece.stream, source, attachment.pool, piece.first_slot * nbytes)

    def _retire(self) -> bool:
        """Complete the pieces that are copied."""
        retired = False
        for _ in range(len(self._issued)):
            piece, attachment, token = self._issued.popleft()
            try:
                if not self._device.is_done(token):
                    self._issued.append((piece, attachment, token))
                    continue
                self._complete(piece, attachment)
            except CopyFailed as error:
                self._complete(piece, attachment, error)
            retired = True
        return retired

    def _complete(self, piece: Piece, attachment: Attachment, error: CopyFailed | None = None) -> None:
        """Count what was copied, or fail the query, once nothing of it is in flight."""
        if error is None:
            self._count(piece.query.kind, records=piece.count, nbytes=piece.count * attachment.record_nbytes)
        else:
            log.error("a copy for worker %s, layer %d failed: %s", piece.worker, piece.query.layer, error)
        if self._arbiter.completed(piece, copied=error is None):
            self._fail(attachment, piece.query)

    def _fail(self, attachment: Attachment, query: CopyQuery) -> None:
        self._count(query.kind, failed_queries=1)
        stream: Stream = "demand" if query.kind == "demand" else "background"
        self._device.write_flag(stream, attachment.flags, query.flag, FAILED)

    def _detach(self, worker: str) -> None:
        attachment = self._attached.get(worker)
        if attachment is None:
            return
        self._take(attachment)
        for query in self._arbiter.drop_worker(worker):
            self._fail(attachment, query)
        start = time.monotonic()
        while self._arbiter.in_flight(worker) and (waited := time.monotonic() - start) < DETACH_S:
            if not self._retire():
                nap(waited)
        del self._attached[worker]
        if self._arbiter.in_flight(worker):
            log.error("copies for worker %s have not ended within %g s; its memory stays mapped", worker, DETACH_S)
        else:
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
