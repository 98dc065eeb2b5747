"""The copy loop: polls the workers' rings, copies what the arbiter allows, raises flags. A thread of its own.

A decode step waits in every layer for the copies of a few records, 50 µs each, so every microsecond between a record in
a ring and the first copy of it counts: tests/bench/bench_copies.py measures them.

Between records it polls without a pause for `step_spin_us` (a GPU's link has a core of its own for that), then naps
ever longer; after `spin_us` without one, and only while no worker runs a step, it sleeps until a Wake (ring.py says why
no record can be lost). All of its state belongs to the thread: others hand it functions to run between two records
(`attach`, `detach`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from msgspec import Struct

from copyengine.arbiter import Arbiter, Piece
from copyengine.device import FAILED, LANDED, STREAMS, Bank, CopyDevice, Memory, Run, Stream
from copyengine.protocol import MAX_QUERY, CopyCounters
from copyengine.ring import KINDS, CopyQuery, Kind, Malformed, RingReader
from copyengine.sync import nap, yield_core
from copyengine.wire.errors import CopyFailed, PeerDied
from copyengine.wire.logs import Log

T = TypeVar("T")
DETACH_S = 2.0
"""Seconds that a worker's copies in flight may take to end before it is detached without them: those of 128 experts of
3 MB take 8 ms. Memory that a copy may still write to is not unmapped, but lost until the process ends."""

STOP_S = 4.0
"""Seconds that `stop` waits for the thread, and the thread for all copies in flight. The process ends without them."""

log = Log(__name__)


class Attachment(Struct, frozen=True):
    """One worker's memory and what is copied into it."""

    worker: str
    banks: Sequence[Bank]  # [L] of E * record_nbytes bytes
    record_nbytes: int
    pool: Memory
    flags: Memory
    ring: Memory
    reader: RingReader

    @property
    def link(self) -> str:
        """What its copies share with those of other workers: a GPU's link, or "" for the host's memory."""
        return self.pool.handle.device

    @property
    def copied_by_processor(self) -> bool:
        """Whether starting a copy takes as long as one within the host's memory."""
        return not self.link or any(bank.pinned_nbytes < bank.nbytes for bank in self.banks)

    def close(self) -> None:
        """Unmap the worker's memory."""
        for memory in (self.pool, self.flags, self.ring):
            memory.close()


class CopierStats(Struct, frozen=True):
    """A snapshot: counters per kind, records that made no sense, who is attached, and whether rings are polled.

    Records count from the start of their copy on, so that none is missing once its flag is up; if the copy fails, they
    are taken back.
    """

    counters: dict[Kind, CopyCounters]
    malformed_records: int
    workers: list[str]
    asleep: bool


class _Tally:
    """The counters of one kind of query. Frozen Structs, made anew for each piece, took a tenth of the loop's time."""

    def __init__(self) -> None:
        self.queries = self.records = self.nbytes = self.failed_queries = 0

    def snapshot(self) -> CopyCounters:
        return CopyCounters(self.queries, self.records, self.nbytes, self.failed_queries)


class Copier:
    """Copies for any number of workers until `stop`."""

    def __init__(
        self,
        device: CopyDevice,
        background_depth: int,
        spin_us: int,
        on_death: Callable[[], None],
        step_spin_us: int = 0,
    ) -> None:
        """`on_death` is called from the thread if it ends by an error: a device that is broken, or a bug of ours."""
        self._device = device
        self._arbiter = Arbiter(background_depth)
        self._spin_s = spin_us / 1e6
        self._step_spin_s = step_spin_us / 1e6
        self._on_death = on_death
        self._attached: dict[str, Attachment] = {}
        self._longest: dict[str, int] = {}  # by link: records of a stream piece
        self._issued: dict[tuple[str, Stream], deque[tuple[Piece, Attachment, Any]]] = {}
        self._tallies = {kind: _Tally() for kind in KINDS}
        self._malformed = 0
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._left: list[Any] = []  # marks of workers that were detached without them
        self._stopping = False
        self._stop_by = 0.0  # on the monotonic clock
        self._settled = True
        self._asleep = False
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> bool:
        """End the thread, if it was started, and unmap all workers' memory; queries not copied get FAILED flags.

        That includes what lies in the rings unread. False if the thread has not ended STOP_S later, or has left copies
        in flight, or ended by an error: then the banks may still be copied from.
        """
        self._stop_by = time.monotonic() + STOP_S
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        return not self._thread.is_alive() and self._settled

    def wake(self) -> None:
        """Poll the rings for at least `spin_us` from now on."""
        self._wake.set()

    def attach(self, attachment: Attachment) -> Future[None]:
        """Serve this worker, in place of one of the same name."""

        def attach() -> None:
            self._detach(attachment.worker)
            self._attached[attachment.worker] = attachment
            self._share_links()

        return self._call(attach)

    def detach(self, worker: str) -> Future[None]:
        """Forget this worker, if it is attached: its queries not copied, the unread ones in its ring too, get FAILED
        flags; its memory is unmapped once no copy goes there."""
        return self._call(lambda: self._detach(worker))

    def drop(self, attachment: Attachment) -> Future[None]:
        """The same for one whose worker is dead; no-op once another one has taken its place."""

        def drop() -> None:
            if self._attached.get(attachment.worker) is attachment:
                self._detach(attachment.worker)

        return self._call(drop)

    def stats(self) -> CopierStats:
        """The counters. From any thread; does not wake a sleeping copier."""
        counters = {kind: tally.snapshot() for kind, tally in self._tallies.items()}
        return CopierStats(counters, self._malformed, sorted(self._attached), self._asleep)

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
        self._settled = False
        try:
            self._loop()
            self._answer_calls()
            for worker in list(self._attached):
                self._detach(worker, self._stop_by)
            self._settled = self._settle_all(self._stop_by)
        except Exception as error:
            log.failed("copy_loop_failed", error, words=True)
            self._on_death()

    def _loop(self) -> None:
        last_work = time.monotonic()
        while not self._stopping:
            if self._wake.is_set():
                self._wake.clear()
                last_work = time.monotonic()
            self._answer_calls()
            if self._poll() | self._issue() | self._retire():
                last_work = time.monotonic()
            else:
                self._rest(time.monotonic() - last_work)

    def _rest(self, idle_s: float) -> None:
        """Pause after `idle_s` without work."""
        if idle_s < self._step_spin_s:
            yield_core()
        elif idle_s < self._spin_s or any(self._issued.values()) or self._steps_run():
            nap(idle_s)
        else:
            self._sleep()

    def _steps_run(self) -> bool:
        return any(attachment.reader.step_runs() for attachment in self._attached.values())

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
        """Take what one ring holds, up to a demand query, which is to be issued before more is read."""
        found = False
        while (record := attachment.reader.poll()) is not None:
            found = True
            if isinstance(record, CopyQuery):
                link = attachment.link
                self._arbiter.submit(attachment.worker, link, record, self._longest[link])
                self._tallies[record.kind].queries += 1
                if record.kind == "demand":
                    break
            else:
                self._refuse(attachment, record)
        return found

    def _refuse(self, attachment: Attachment, record: Malformed) -> None:
        self._malformed += 1
        log.error("record_malformed", worker=attachment.worker, detail=record.why)
        if record.flag is not None:
            self._device.write_flag("demand", attachment.flags, record.flag, FAILED)

    def _issue(self) -> bool:
        """Issue one piece, so that a demand query waits for no more than that."""
        piece = self._arbiter.next()
        if piece is None:
            return False
        attachment, stream = self._attached[piece.worker], piece.stream
        if piece.runs:
            try:
                self._start(piece, attachment)
            except CopyFailed as error:
                self._complete(piece, attachment, error)
                return True
        if piece.last:
            if not attachment.link:  # it has landed, and its worker may look as soon as the flag is up
                attachment.reader.over(piece.query.flag)
            self._device.write_flag(stream, attachment.flags, piece.query.flag, LANDED)
        token = self._device.mark(stream, attachment.pool)
        if token is None:
            self._complete(piece, attachment)
        else:
            self._issued.setdefault((piece.link, stream), deque()).append((piece, attachment, token))
        return True

    def _start(self, piece: Piece, attachment: Attachment) -> None:
        """Start its copies and count them."""
        nbytes = attachment.record_nbytes
        runs = [Run(expert * nbytes, slot * nbytes, count * nbytes) for expert, slot, count in piece.runs]
        tally = self._tallies[piece.query.kind]
        tally.records += piece.records
        tally.nbytes += piece.records * nbytes
        self._device.copy(piece.stream, attachment.banks[piece.query.layer], attachment.pool, runs)

    def _retire(self) -> bool:
        """Complete the pieces that are copied. Those of one stream end in order, so only the first is looked at."""
        retired = False
        for issued in self._issued.values():
            while issued:
                piece, attachment, token = issued[0]
                error = None
                try:
                    if not self._device.is_done(token):
                        break
                except CopyFailed as failure:
                    error = failure
                issued.popleft()
                self._complete(piece, attachment, error)
                retired = True
        return retired

    def _complete(self, piece: Piece, attachment: Attachment, error: CopyFailed | None = None) -> None:
        """Nothing of the piece is in flight; fail its query once that holds for all of it."""
        if error is not None:
            log.error("copy_failed", worker=piece.worker, layer=piece.query.layer, detail=str(error))
            tally = self._tallies[piece.query.kind]
            tally.records -= piece.records
            tally.nbytes -= piece.records * attachment.record_nbytes
        if self._arbiter.completed(piece, copied=error is None):
            self._fail(attachment, piece.query)
        elif piece.last and error is None:
            attachment.reader.over(piece.query.flag)

    def _fail(self, attachment: Attachment, query: CopyQuery) -> None:
        self._tallies[query.kind].failed_queries += 1
        attachment.reader.over(query.flag)
        stream: Stream = "demand" if query.kind == "demand" else "background"
        self._device.write_flag(stream, attachment.flags, query.flag, FAILED)

    def _detach(self, worker: str, end: float | None = None) -> None:
        """Waits for its copies in flight until `end` on the monotonic clock; for DETACH_S if that is not given."""
        attachment = self._attached.get(worker)
        if attachment is None:
            return
        while self._take(attachment):
            pass
        for query in self._arbiter.drop_worker(worker):
            self._fail(attachment, query)
        start = time.monotonic()
        ended = self._settle(attachment, start + DETACH_S if end is None else end)
        del self._attached[worker]
        self._share_links()
        if ended:
            attachment.close()
        else:
            waited = time.monotonic() - start
            log.error("copies_stuck", worker=worker, after_s=waited, detail="its memory stays mapped")

    def _settle(self, attachment: Attachment, end: float) -> bool:
        """Wait until none of its copies and flag writes is in flight, or `end` passes; whether that is so."""
        start = time.monotonic()
        marks = [token for stream in STREAMS if (token := self._device.mark(stream, attachment.pool)) is not None]
        while marks or self._arbiter.in_flight(attachment.worker):
            marks = [token for token in marks if not self._is_over(token)]
            now = time.monotonic()
            if now > end:
                self._left += marks
                return False
            if not self._retire():
                nap(now - start)
        return True

    def _settle_all(self, end: float) -> bool:
        """The same for all workers that were detached without it."""
        start = now = time.monotonic()
        while self._left or any(self._issued.values()):
            self._left = [token for token in self._left if not self._is_over(token)]
            if not self._retire():
                if now > end:
                    return False
                nap(now - start)
            now = time.monotonic()
        return True

    def _is_over(self, token: Any) -> bool:
        try:
            return self._device.is_done(token)
        except CopyFailed:
            return True

    def _share_links(self) -> None:
        """How long stream pieces may be. One worker's steps put no demand query behind its own stream queries, so a
        piece may be a whole query where no other worker's demand could wait for it. Not where a copy holds up the loop
        itself: on the host, and where banks are not all pinned.
        """
        attached = list(self._attached.values())
        links = [attachment.link for attachment in attached if not attachment.copied_by_processor]
        self._longest = {one.link: MAX_QUERY if links.count(one.link) == 1 else 1 for one in attached}
