"""The order of copies: by hand with a fake copier, and the rules of the module's docstring as properties."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copyengine.arbiter import Arbiter, Piece
from copyengine.ring import KINDS, CopyQuery, Kind

RECORD_S = 1.0
LINK = "gpu"


def query(kind: Kind, experts: tuple[int, ...], slots: tuple[int, ...] | None = None, flag: int = 0) -> CopyQuery:
    return CopyQuery(flag, kind, 0, experts, slots if slots is not None else experts)


class FakeCopier:
    """Issues all that is allowed, at once; a link copies it in the order of issue, at RECORD_S a record, whatever the
    stream: streams have no priority. The clock is ours. Without `advance` pieces complete when they are told to.
    """

    def __init__(self, depth: int = 2, longest: int = 1) -> None:
        self.arbiter = Arbiter(depth)
        self.longest = longest
        self.now = 0.0
        self.link_free = 0.0  # when all that is in flight will be copied
        self.in_flight: list[Piece] = []
        self.ends: list[float] = []  # of in_flight
        self.order: list[tuple[int, int]] = []  # what was issued, first expert and records
        self.issued_at: list[tuple[float, int]] = []  # first expert
        self.landed_at: dict[int, float] = {}  # by flag

    def submit(self, worker: str, query: CopyQuery) -> None:
        self.arbiter.submit(worker, LINK, query, self.longest)

    def issue(self) -> list[tuple[int, int]]:
        """What is issued now."""
        before = len(self.order)
        while (piece := self.arbiter.next()) is not None:
            self.link_free = max(self.link_free, self.now) + piece.records * RECORD_S
            self.in_flight.append(piece)
            self.ends.append(self.link_free)
            first = piece.runs[0][0] if piece.runs else 0
            self.order.append((first, piece.records))
            self.issued_at.append((self.now, first))
        return self.order[before:]

    def complete(self, index: int = 0, copied: bool = True) -> bool:
        piece, end = self.in_flight.pop(index), self.ends.pop(index)
        if piece.last and copied:
            self.landed_at[piece.query.flag] = end
        return self.arbiter.completed(piece, copied)

    def advance(self, until: float) -> None:
        """Let the clock run: pieces complete in their order, and each time what is allowed by then is issued."""
        self.issue()
        while self.ends and self.ends[0] <= until:
            self.now = self.ends[0]
            self.complete()
            self.issue()
        self.now = until


def test_a_demand_query_is_one_piece_of_its_runs() -> None:
    """A run goes on while both numbers count up by one; a gap in either begins a new one."""
    copier = FakeCopier()
    copier.submit("w", query("demand", (1, 2, 3, 5, 6, 7), (10, 11, 12, 13, 20, 21)))
    assert copier.issue() == [(1, 6)]
    (piece,) = copier.in_flight
    assert piece.runs == ((1, 10, 3), (5, 13, 1), (6, 20, 2)) and piece.last and piece.stream == "demand"


def test_background_goes_in_pieces_of_one_two_at_a_time() -> None:
    copier = FakeCopier()
    copier.submit("w", query("stream", (1, 2, 3, 4)))
    assert copier.issue() == [(1, 1), (2, 1)]
    copier.complete()
    assert copier.issue() == [(3, 1)]


@pytest.mark.parametrize(
    ("longest", "pieces"), [(2, [(1, 2), (3, 2), (9, 1)]), (4, [(1, 4), (9, 1)]), (5, [(1, 5)]), (128, [(1, 5)])]
)
def test_stream_pieces_are_as_long_as_they_may_be_and_prefetch_ones_have_one_record(
    longest: int, pieces: list[tuple[int, int]]
) -> None:
    copier = FakeCopier(depth=20, longest=longest)
    experts = (1, 2, 3, 4, 9)
    copier.submit("w", query("stream", experts))
    copier.submit("w", query("prefetch", experts))
    assert copier.issue() == [*pieces, *((e, 1) for e in experts)]
    assert [p.last for p in copier.in_flight] == [*[False] * (len(pieces) - 1), True, *[False] * 4, True]
    runs = [run for piece in copier.in_flight[: len(pieces)] for run in piece.runs]
    assert sum(count for _, _, count in runs) == 5 and runs[-1] == (9, 9, 1)


def test_demand_overtakes_and_holds_background_until_it_is_copied() -> None:
    """Two background pieces are in flight when demand comes; no third one until the demand piece is complete."""
    copier = FakeCopier()
    copier.submit("w", query("stream", (1, 2, 3, 4)))
    copier.issue()
    copier.submit("other", query("demand", (50,)))
    assert copier.issue() == [(50, 1)]
    copier.complete(0)
    copier.complete(0)
    assert copier.issue() == []
    copier.complete(0)
    assert copier.issue() == [(3, 1), (4, 1)]


def test_links_do_not_wait_for_each_other_and_demand_goes_first_among_them() -> None:
    """Each has its own depth, and demand on one holds nothing back on the other."""
    arbiter = Arbiter(1)
    arbiter.submit("a", "left", query("stream", (1, 2)))
    arbiter.submit("b", "right", query("stream", (3, 4)))
    arbiter.submit("b", "right", query("demand", (7,)))
    arbiter.submit("a", "left", query("demand", (8,)))
    pieces = []
    while (piece := arbiter.next()) is not None:
        pieces.append(piece)
    assert [(p.link, p.runs[0][0]) for p in pieces] == [("right", 7), ("left", 8)]
    arbiter.completed(pieces[0])
    piece = arbiter.next()
    assert piece is not None and (piece.link, piece.runs[0][0]) == ("right", 3)
    assert arbiter.next() is None
    arbiter.completed(pieces[1])
    piece = arbiter.next()
    assert piece is not None and (piece.link, piece.runs[0][0]) == ("left", 1)
    assert arbiter.next() is None and (arbiter.in_flight("a"), arbiter.in_flight("b")) == (1, 1)


def test_demand_on_one_link_goes_before_older_streams_on_another() -> None:
    arbiter = Arbiter(1)
    arbiter.submit("a", "left", query("stream", (1, 2)))
    arbiter.submit("b", "right", query("demand", (7,)))
    assert [piece.link for _ in range(2) if (piece := arbiter.next())] == ["right", "left"]


def test_prefetch_only_when_nothing_else_is_due() -> None:
    copier = FakeCopier(depth=1)
    copier.submit("w", query("prefetch", (9,)))
    copier.submit("w", query("stream", (1, 2)))
    copier.submit("w", query("demand", (5, 7)))
    copier.submit("w", query("demand", (6,)))
    for _ in range(6):
        copier.issue()
        if copier.in_flight:
            copier.complete()
    assert copier.order == [(5, 2), (6, 1), (1, 1), (2, 1), (9, 1)]


def test_an_empty_query_is_one_piece_of_nothing() -> None:
    copier = FakeCopier()
    for kind in KINDS:
        copier.submit("w", query(kind, ()))
    assert copier.issue() == [(0, 0)]
    copier.complete()
    assert copier.issue() == [(0, 0), (0, 0)]
    assert all(piece.last and piece.runs == () for piece in copier.in_flight)


def test_demand_waits_for_what_is_in_flight_and_no_longer() -> None:
    """By hand, one second a record, depth 2: at 2.5 s the third and fourth background records are in flight, until 4 s.
    Two demand queries of 3 and 1 records come at 2.5 and 3 s; background goes on when the second has landed.
    """
    copier = FakeCopier()
    copier.submit("w", query("stream", (0, 1, 2, 3, 4, 5), flag=0))
    copier.advance(2.5)
    copier.submit("w", query("demand", (50, 51, 60), flag=1))
    copier.advance(3)
    copier.submit("other", query("demand", (70,), flag=2))
    copier.advance(20)
    assert copier.issued_at == [(0, 0), (0, 1), (1, 2), (2, 3), (2.5, 50), (3, 70), (8, 4), (8, 5)]
    assert copier.landed_at == {1: 7, 2: 8, 0: 10}


arrivals = st.tuples(st.floats(0, 3), st.sampled_from(KINDS), st.integers(1, 5))


@settings(max_examples=300)
@given(st.lists(arrivals, max_size=12), st.integers(1, 3), st.integers(1, 6))
def test_times_of_issue_and_landing_for_any_arrivals(
    arriving: list[tuple[float, Kind, int]], depth: int, longest: int
) -> None:
    """A demand query is issued when it comes, and lands after what was in flight then, which is at most `depth`
    background pieces of `longest` records and the demand queries before it; a background piece is issued only when all
    demand before has landed, and the link never idles while something waits.
    """
    copier = FakeCopier(depth, longest)
    demand_until, issued_before = 0.0, 0

    def check_background() -> None:
        nonlocal issued_before
        for at, expert in copier.issued_at[issued_before:]:
            if expert < 100:
                assert at >= demand_until
        issued_before = len(copier.issued_at)

    for flag, (gap, kind, length) in enumerate(arriving):
        copier.advance(copier.now + gap)
        check_background()
        first = 100 if kind == "demand" else 0
        copier.submit("w", query(kind, tuple(range(first, first + length)), flag=flag))
        if kind == "demand":
            busy = max(copier.link_free, copier.now)
            assert busy <= max(demand_until, copier.now) + depth * longest * RECORD_S + 1e-9
            demand_until = busy + length * RECORD_S
            assert copier.issue() == [(100, length)]
            assert copier.ends[-1] == demand_until
            issued_before = len(copier.issued_at)
    copier.advance(1000)
    check_background()
    assert len(copier.landed_at) == len(arriving)
    total, at = 0.0, 0.0  # when a link that never idles with work at hand is done
    for gap, _, length in arriving:
        at += gap
        total = max(total, at) + length * RECORD_S
    assert max(copier.landed_at.values(), default=0.0) <= total + 1e-6


def test_a_query_fails_once_after_all_that_was_in_flight_of_it() -> None:
    """Two of its pieces fail, one does not: only the last of the three says so; the next query is not touched."""
    copier = FakeCopier(depth=3)
    copier.submit("w", query("stream", (1, 2, 3, 4)))
    copier.submit("w", query("stream", (8,)))
    assert copier.issue() == [(1, 1), (2, 1), (3, 1)]
    assert not copier.complete(1, copied=False)
    assert copier.issue() == [(8, 1)]  # and not 4
    assert not copier.complete(0, copied=True)
    assert copier.complete(0, copied=False)
    assert not copier.complete(0)
    assert copier.issue() == []


def test_the_last_piece_of_a_query_may_be_copied_after_another_failed() -> None:
    copier = FakeCopier()
    copier.submit("w", query("stream", (1, 3)))
    copier.issue()
    assert not copier.complete(0, copied=False)
    assert copier.complete(0, copied=True)


def test_a_dropped_worker_keeps_only_what_is_in_flight() -> None:
    """Its queries of which nothing is in flight are told at once, the one under way when its piece is over."""
    copier = FakeCopier(depth=1)
    for kind in KINDS[1:]:
        copier.submit("gone", query(kind, (1, 3)))
        copier.submit("stays", query(kind, (2,)))
    piece = copier.arbiter.next()
    assert piece is not None and piece.worker == "gone" and copier.arbiter.in_flight("gone") == 1
    copier.submit("gone", query("demand", (1, 3)))
    copier.submit("stays", query("demand", (2,)))
    assert [q.kind for q in copier.arbiter.drop_worker("gone")] == ["prefetch", "demand"]
    assert copier.arbiter.completed(piece)
    assert copier.arbiter.in_flight("gone") == 0
    while copier.issue():
        assert {p.worker for p in copier.in_flight} == {"stays"}
        copier.complete()
    assert copier.order == [(2, 1)] * 3


def test_a_dropped_workers_query_that_is_all_handed_out_still_lands() -> None:
    copier = FakeCopier()
    copier.submit("w", query("demand", (1, 3)))
    copier.issue()
    assert copier.arbiter.drop_worker("w") == []
    assert not copier.complete(0)


LINK_OF = {"a": "left", "b": "left", "c": "right"}
pairs = st.lists(st.integers(0, 12), unique=True, max_size=8).map(sorted)
submissions = st.tuples(st.sampled_from("abc"), st.sampled_from(KINDS), pairs, st.integers(0, 3), st.integers(1, 9))


@settings(max_examples=300)
@given(st.lists(st.one_of(submissions, st.just("next"), st.integers(0, 5)), max_size=40), st.integers(1, 3))
def test_rules_hold_for_any_interleaving(events: list[object], depth: int) -> None:
    """Every pair exactly once, in its query's order; demand in one piece; on no link background while demand is
    outstanding there; pieces no longer than allowed; all of it ends.
    """
    arbiter = Arbiter(depth)
    submitted: list[tuple[str, CopyQuery, int]] = []
    waiting: Counter[str] = Counter()  # demand queries not handed out, by link
    in_flight: list[Piece] = []
    issued: dict[int, list[tuple[int, int]]] = defaultdict(list)
    finished: list[int] = []

    def take() -> bool:
        piece = arbiter.next()
        if piece is None:
            return False
        worker, query, longest = submitted[piece.query.flag]
        there = [p for p in in_flight if p.link == piece.link]
        assert piece.link == LINK_OF[worker]
        if piece.stream == "background":
            assert not waiting[piece.link] and not any(p.stream == "demand" for p in there)
            assert piece.records <= (longest if query.kind == "stream" else 1)
            assert sum(p.stream == "background" for p in there) < depth
        else:
            assert piece.last and piece.records == len(query.experts)
            waiting[piece.link] -= 1
        flag = piece.query.flag
        assert flag not in finished
        assert piece.records == sum(count for _, _, count in piece.runs)
        for (expert, slot, count), after in zip(piece.runs, (*piece.runs[1:], (99, 0, 1)), strict=False):
            issued[flag].extend((expert + i, slot + i) for i in range(count))
            assert after[:2] != (expert + count, slot + count)  # else they would be one run
        if piece.last:
            finished.append(flag)
        in_flight.append(piece)
        return True

    for event in events:
        if isinstance(event, tuple):
            worker, kind, experts, gap, longest = event
            flag = len(submitted)
            slots = tuple(e + (gap if e > 4 else 0) for e in experts)
            submitted.append((worker, query(kind, tuple(experts), slots, flag), longest))
            arbiter.submit(worker, LINK_OF[worker], submitted[-1][1], longest)
            waiting[LINK_OF[worker]] += kind == "demand"
        elif event == "next":
            take()
        elif in_flight:
            assert isinstance(event, int)
            arbiter.completed(in_flight.pop(event % len(in_flight)))
    while take() or in_flight:
        if in_flight:
            arbiter.completed(in_flight.pop(0))
    for flag, (_, q, _) in enumerate(submitted):
        assert issued[flag] == list(zip(q.experts, q.slots, strict=True))
    assert sorted(finished) == list(range(len(submitted)))
    for worker in "abc":
        for kind in KINDS:  # first come, first served
            of_kind = [q.flag for w, q, _ in submitted if q.kind == kind and LINK_OF[w] == LINK_OF[worker]]
            assert [flag for flag in finished if flag in of_kind] == of_kind
        assert arbiter.in_flight(worker) == 0
