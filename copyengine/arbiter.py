"""In which order copies are issued. Pure: no clock, no memory, no threads.

Streams of a device give no priority between copies, so the order is decided here, for each link by itself, by what is
handed out when:

- Demand queries first, first come first served, each as one piece: nothing could overtake its second half anyhow.
- Background queries (stream, then prefetch) in pieces of a few records, at most `background_depth` of them in flight,
  and none while a demand query is outstanding: submitted and not completely copied.

How long a background piece may be is said with each query. One that is in flight when a demand query comes delays it:
a piece of 1 / 8 / 128 records of 2.8 MB made a one-record query take 207 / 777 / 4,362 µs (H200, 2026-11). But only
longer pieces get all of a link's rate, 55 instead of 50 GB/s, where their records are neighbours.

The pieces of a query are handed out in order. `Piece.last` tells when its flag is due: after that piece, on its stream.
A query of which a piece could not be copied hands out no more; it has failed once none of its pieces is in flight.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import count

from msgspec import Struct

from copyengine.device import Stream
from copyengine.ring import KINDS, CopyQuery, Kind

PREFETCH_RECORDS = 1
"""Records of a prefetch piece, whatever the link allows: what nobody waits for must delay nobody."""


class Piece(Struct, frozen=True):
    """Records of one query to copy in one go.

    `runs` is empty for the only piece of an empty query: nothing to copy, but its flag is due.
    """

    worker: str
    link: str
    query: CopyQuery
    number: int  # of the query, among all that were ever submitted
    stream: Stream
    runs: tuple[
        tuple[int, int, int], ...
    ]  # (expert, slot, count): neighbours in both, experts expert.. to slots slot..
    records: int
    last: bool


class _Job:
    """A query: its pieces not handed out yet, how many are in flight, and whether it must fail."""

    def __init__(self, worker: str, link: str, query: CopyQuery, number: int, longest: int) -> None:
        self.worker = worker
        self.link = link
        self.query = query
        self.number = number
        self.pieces = _cut(worker, link, query, number, longest)
        self.in_flight = 0
        self.failed = False


class _Link:
    """What waits for one link, and how much is in flight there."""

    def __init__(self) -> None:
        self.waiting: dict[Kind, deque[_Job]] = {kind: deque() for kind in KINDS}  # with pieces to hand out
        self.in_flight: dict[Stream, int] = {"demand": 0, "background": 0}
        self._queues = tuple(self.waiting.values())  # in the order of KINDS

    def due(self, depth: int) -> _Job | None:
        """The job whose next piece may go now."""
        demand, stream, prefetch = self._queues
        if demand:
            return demand[0]
        if (stream or prefetch) and not self.in_flight["demand"] and self.in_flight["background"] < depth:
            return (stream or prefetch)[0]
        return None


class Arbiter:
    """Takes queries of any number of workers, hands out pieces."""

    def __init__(self, background_depth: int) -> None:
        self._depth = background_depth
        self._numbers = count()
        self._jobs: dict[int, _Job] = {}  # by number: with pieces to hand out or in flight
        self._links: dict[str, _Link] = {}
        self._in_flight: Counter[str] = Counter()  # pieces of each worker

    def submit(self, worker: str, link: str, query: CopyQuery, longest: int = 1) -> None:
        """Queue one query for `link`. A stream query is cut into pieces of at most `longest` records."""
        number = next(self._numbers)
        job = self._jobs[number] = _Job(worker, link, query, number, longest)
        if link not in self._links:
            self._links[link] = _Link()
        self._links[link].waiting[query.kind].append(job)

    def next(self) -> Piece | None:
        """The next piece that may be issued now, which then counts as in flight; None if there is none.

        Of several links' pieces a demand query's, and of those the one that came first.
        """
        best: _Job | None = None
        for link in self._links.values():
            job = link.due(self._depth)
            if job is not None and (best is None or _order(job) < _order(best)):
                best = job
        if best is None:
            return None
        piece = best.pieces.popleft()
        link = self._links[best.link]
        if not best.pieces:
            link.waiting[best.query.kind].popleft()
        best.in_flight += 1
        link.in_flight[piece.stream] += 1
        self._in_flight[piece.worker] += 1
        return piece

    def completed(self, piece: Piece, copied: bool = True) -> bool:
        """The piece is no longer in flight: it is copied, or it failed.

        True if by that its whole query has failed: once for each such query, and nothing of it is in flight then.
        """
        self._in_flight[piece.worker] -= 1
        self._links[piece.link].in_flight[piece.stream] -= 1
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
        return self._in_flight[worker]

    def _fail(self, job: _Job) -> None:
        job.failed = True
        if job.pieces:
            job.pieces.clear()
            self._links[job.link].waiting[job.query.kind].remove(job)


def _order(job: _Job) -> tuple[bool, int]:
    return job.query.kind != "demand", job.number


def _cut(worker: str, link: str, query: CopyQuery, number: int, longest: int) -> deque[Piece]:
    """The pieces of a query; at least one."""
    experts, slots, n = query.experts, query.slots, len(query.experts)
    if query.kind == "demand":
        return deque((Piece(worker, link, query, number, "demand", _runs(experts, slots), n, True),))
    size = PREFETCH_RECORDS if query.kind == "prefetch" else longest
    pieces: deque[Piece] = deque()
    for first in range(0, n or 1, size):
        part = slice(first, first + size)
        runs = _runs(experts[part], slots[part])
        records = min(size, n - first)
        pieces.append(Piece(worker, link, query, number, "background", runs, records, first + size >= n))
    return pieces


def _runs(experts: Sequence[int], slots: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(expert, slot, count) of each run of pairs that both count up by one."""
    runs: list[tuple[int, int, int]] = []
    expert = slot = length = 0
    for e, s in zip(experts, slots, strict=True):
        if length and e == expert + length and s == slot + length:
            length += 1
            continue
        if length:
            runs.append((expert, slot, length))
        expert, slot, length = e, s, 1
    if length:
        runs.append((expert, slot, length))
    return tuple(runs)
