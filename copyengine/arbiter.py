"""In which order copies are issued. Pure: no clock, no memory, no threads.

Streams of a device give no priority between copies, so the order is decided here, by what is handed out when:

- Demand queries first, first come first served; neighbouring (expert, slot) pairs become one piece.
- Background queries (stream, then prefetch) in pieces of one record, at most `background_depth` of them in flight, and
  none while a demand query is outstanding: submitted and not completely copied.

The pieces of a query are handed out in order. `Piece.last` tells when its flag is due: after that piece, on its stream.
A query of which a piece could not be copied hands out no more; it has failed once none of its pieces is in flight.
"""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import count

from msgspec import Struct

from copyengine.device import Stream
from copyengine.ring import KINDS, CopyQuery, Kind


class Piece(Struct, frozen=True):
    """`count` neighbouring records to copy: experts first_expert.. of `query.layer` into slots first_slot..

    `count` is 0 for the only piece of an empty query: nothing to copy, but its flag is due.
    """

    worker: str
    query: CopyQuery
    number: int  # of the query, among all that were ever submitted
    stream: Stream
    first_expert: int
    first_slot: int
    count: int
    last: bool


class _Job:
    """A query: its pieces not handed out yet, how many are in flight, and whether it must fail."""

    def __init__(self, worker: str, query: CopyQuery, number: int) -> None:
        self.worker = worker
        self.query = query
        self.pieces = deque(_cut(worker, query, number))
        self.in_flight = 0
        self.failed = False


class Arbiter:
    """Takes queries of any number of workers, hands out pieces."""

    def __init__(self, background_depth: int) -> None:
        self._depth = background_depth
        self._numbers = count()
        self._jobs: dict[int, _Job] = {}  # by number: with pieces to hand out or in flight
        self._waiting: dict[Kind, deque[_Job]] = {kind: deque() for kind in KINDS}  # with pieces to hand out
        self._in_flight: Counter[tuple[str, Stream]] = Counter()  # pieces of each worker on each stream

    def submit(self, worker: str, query: CopyQuery) -> None:
        """Queue one query."""
        number = next(self._numbers)
        job = self._jobs[number] = _Job(worker, query, number)
        self._waiting[query.kind].append(job)

    def next(self) -> Piece | None:
        """The next piece that may be issued now, which then counts as in flight; None if there is none."""
        kind = self._next_kind()
        if kind is None:
            return None
        job = self._waiting[kind][0]
        piece = job.pieces.popleft()
        if not job.pieces:
            self._waiting[kind].popleft()
        job.in_flight += 1
        self._in_flight[piece.worker, piece.stream] += 1
        return piece

    def completed(self, piece: Piece, copied: bool = True) -> bool:
        """The piece is no longer in flight: it is copied, or it failed.

        True if by that its whole query has failed: once for each such query, and nothing of it is in flight then.
        """
        self._in_flight[piece.worker, piece.stream] -= 1
        job = self._jobs[piece.number]
        job.in_flight -= 1
        if not copied:
            self._fail(job)
        if job.pieces or job.in_flight:
            return False
        del self._jobs[piece.number]
        return job.failed

    def drop_worker(self, worker: str) -> list[CopyQuery]:
        """Fail this worker's queries of which not all is handed out; those of which nothing is in flight.

        `completed` tells when the others have failed.
        """
        dropped = []
        for number, job in list(self._jobs.items()):
            if job.worker == worker and job.pieces:
                self._fail(job)
                if not job.in_flight:
                    del self._jobs[number]
                    dropped.append(job.query)
        return dropped

    def in_flight(self, worker: str) -> int:
        """Pieces of this worker that are handed out and not completed."""
        return self._in_flight[worker, "demand"] + self._in_flight[worker, "background"]

    def _fail(self, job: _Job) -> None:
        job.failed = True
        if job.pieces:
            job.pieces.clear()
            self._waiting[job.query.kind].remove(job)

    def _next_kind(self) -> Kind | None:
        if self._waiting["demand"]:
            return "demand"
        in_flight: Counter[Stream] = Counter()
        for (_, stream), pieces in self._in_flight.items():
            in_flight[stream] += pieces
        if in_flight["demand"] or in_flight["background"] >= self._depth:
            return None
        return next((kind for kind in KINDS if self._waiting[kind]), None)


def _cut(worker: str, query: CopyQuery, number: int) -> Iterator[Piece]:
    stream: Stream = "demand" if query.kind == "demand" else "background"
    runs = _runs(query, longest=len(query.experts) if stream == "demand" else 1) or [(0, 0, 0)]
    for i, (expert, slot, length) in enumerate(runs):
        yield Piece(worker, query, number, stream, expert, slot, length, last=i == len(runs) - 1)


def _runs(query: CopyQuery, longest: int) -> list[tuple[int, int, int]]:
    """(expert, slot, length) of each run of pairs that both count up by one."""
    runs: list[tuple[int, int, int]] = []
    for expert, slot in zip(query.experts, query.slots, strict=True):
        if runs:
            first_expert, first_slot, length = runs[-1]
            if length < longest and (expert, slot) == (first_expert + length, first_slot + length):
                runs[-1] = (first_expert, first_slot, length + 1)
                continue
        runs.append((expert, slot, 1))
    return runs
