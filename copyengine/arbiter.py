"""In which order copies are issued. Pure: no clock, no memory, no threads.

Streams of a device give no priority between copies, so the order is decided here, by what is handed out when:

- Demand queries first, first come first served; neighbouring (expert, slot) pairs become one piece.
- Background queries (stream, then prefetch) in pieces of one record, at most `background_depth` of them in flight, and
  none while a demand query is outstanding: submitted and not completely copied.

The pieces of a query are handed out in order. `Piece.last` tells when its flag is due: after that piece, on its stream.
"""

from collections import Counter, deque
from collections.abc import Iterator

from msgspec import Struct

from copyengine.device import Stream
from copyengine.ring import KINDS, CopyQuery, Kind


class Piece(Struct, frozen=True):
    """`count` neighbouring records to copy: experts first_expert.. of `query.layer` into slots first_slot..

    `count` is 0 for the only piece of an empty query: nothing to copy, but its flag is due.
    """

    worker: str
    query: CopyQuery
    stream: Stream
    first_expert: int
    first_slot: int
    count: int
    last: bool


class _Job:
    """A query and its pieces not handed out yet."""

    def __init__(self, worker: str, query: CopyQuery) -> None:
        self.worker = worker
        self.query = query
        self.pieces = deque(_cut(worker, query))


class Arbiter:
    """Takes queries of any number of workers, hands out pieces."""

    def __init__(self, background_depth: int) -> None:
        self._depth = background_depth
        self._waiting: dict[Kind, deque[_Job]] = {kind: deque() for kind in KINDS}
        self._in_flight: Counter[tuple[str, Stream]] = Counter()  # pieces of each worker on each stream

    def submit(self, worker: str, query: CopyQuery) -> None:
        """Queue one query."""
        self._waiting[query.kind].append(_Job(worker, query))

    def next(self) -> Piece | None:
        """The next piece that may be issued now, which then counts as in flight; None if there is none."""
        kind = self._next_kind()
        if kind is None:
            return None
        job = self._waiting[kind][0]
        piece = job.pieces.popleft()
        if not job.pieces:
            self._waiting[kind].popleft()
        self._in_flight[piece.worker, piece.stream] += 1
        return piece

    def completed(self, piece: Piece) -> None:
        """The piece is copied, or failed: it is no longer in flight."""
        self._in_flight[piece.worker, piece.stream] -= 1

    def drop(self, query: CopyQuery) -> None:
        """Hand out no more pieces of this query, one of whose pieces was the last to be handed out of its kind."""
        waiting = self._waiting[query.kind]
        if waiting and waiting[0].query is query:
            waiting.popleft()

    def drop_worker(self, worker: str) -> list[CopyQuery]:
        """Hand out no more pieces of this worker's; the queries that will never be finished."""
        dropped = []
        for kind, waiting in self._waiting.items():
            dropped += [job.query for job in waiting if job.worker == worker]
            self._waiting[kind] = deque(job for job in waiting if job.worker != worker)
        return dropped

    def in_flight(self, worker: str) -> int:
        """Pieces of this worker that are handed out and not completed."""
        return self._in_flight[worker, "demand"] + self._in_flight[worker, "background"]

    def _next_kind(self) -> Kind | None:
        if self._waiting["demand"]:
            return "demand"
        in_flight: Counter[Stream] = Counter()
        for (_, stream), pieces in self._in_flight.items():
            in_flight[stream] += pieces
        if in_flight["demand"] or in_flight["background"] >= self._depth:
            return None
        return next((kind for kind in KINDS if self._waiting[kind]), None)


def _cut(worker: str, query: CopyQuery) -> Iterator[Piece]:
    stream: Stream = "demand" if query.kind == "demand" else "background"
    runs = _runs(query, longest=len(query.experts) if stream == "demand" else 1) or [(0, 0, 0)]
    for i, (expert, slot, count) in enumerate(runs):
        yield Piece(worker, query, stream, expert, slot, count, last=i == len(runs) - 1)


def _runs(query: CopyQuery, longest: int) -> list[tuple[int, int, int]]:
    """(expert, slot, count) of each run of pairs that both count up by one."""
    runs: list[tuple[int, int, int]] = []
    for expert, slot in zip(query.experts, query.slots, strict=True):
        if runs:
            first_expert, first_slot, count = runs[-1]
            if count < longest and (expert, slot) == (first_expert + count, first_slot + count):
                runs[-1] = (first_expert, first_slot, count + 1)
                continue
        runs.append((expert, slot, 1))
    return runs
