"""The order of copies: by hand with a fake copier, and the rules of the module's docstring as properties."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from copyengine.arbiter import Arbiter, Piece
from copyengine.ring import KINDS, CopyQuery, Kind


def query(kind: Kind, experts: tuple[int, ...], slots: tuple[int, ...] | None = None, flag: int = 0) -> CopyQuery:
    return CopyQuery(flag, kind, 0, experts, slots if slots is not None else experts)


class FakeCopier:
    """Issues all that is allowed; completes pieces when told to. `order` is what was issued, first expert and count."""

    def __init__(self, depth: int = 2) -> None:
        self.arbiter = Arbiter(depth)
        self.in_flight: list[Piece] = []
        self.order: list[tuple[int, int]] = []

    def issue(self) -> list[tuple[int, int]]:
        """What is issued now."""
        before = len(self.order)
        while (piece := self.arbiter.next()) is not None:
            self.in_flight.append(piece)
            self.order.append((piece.first_expert, piece.count))
        return self.order[before:]

    def complete(self, index: int = 0) -> None:
        self.arbiter.completed(self.in_flight.pop(index))


def test_neighbours_of_a_demand_query_are_one_piece() -> None:
    """Runs where both numbers count up by one; a gap in either begins a new piece. Only the last piece is `last`."""
    copier = FakeCopier()
    copier.arbiter.submit("w", query("demand", (1, 2, 3, 5, 6, 7), (10, 11, 12, 13, 20, 21)))
    assert copier.issue() == [(1, 3), (5, 1), (6, 2)]
    assert [(p.first_slot, p.last) for p in copier.in_flight] == [(10, False), (13, False), (20, True)]


def test_background_goes_in_pieces_of_one_two_at_a_time() -> None:
    copier = FakeCopier()
    copier.arbiter.submit("w", query("stream", (1, 2, 3, 4)))
    assert copier.issue() == [(1, 1), (2, 1)]
    copier.complete()
    assert copier.issue() == [(3, 1)]


def test_demand_overtakes_and_holds_background_until_it_is_copied() -> None:
    """Two background pieces are in flight when demand comes; no third one until the demand piece is complete."""
    copier = FakeCopier()
    copier.arbiter.submit("w", query("stream", (1, 2, 3, 4)))
    copier.issue()
    copier.arbiter.submit("other", query("demand", (50,)))
    assert copier.issue() == [(50, 1)]
    copier.complete(0)
    copier.complete(0)
    assert copier.issue() == []
    copier.complete(0)
    assert copier.issue() == [(3, 1), (4, 1)]


def test_prefetch_only_when_nothing_else_is_due() -> None:
    copier = FakeCopier(depth=1)
    copier.arbiter.submit("w", query("prefetch", (9,)))
    copier.arbiter.submit("w", query("stream", (1, 2)))
    copier.arbiter.submit("w", query("demand", (5, 7)))
    copier.arbiter.submit("w", query("demand", (6,)))
    for _ in range(6):
        copier.issue()
        if copier.in_flight:
            copier.complete()
    assert copier.order == [(5, 1), (7, 1), (6, 1), (1, 1), (2, 1), (9, 1)]


def test_an_empty_query_is_one_piece_of_nothing() -> None:
    copier = FakeCopier()
    for kind in KINDS:
        copier.arbiter.submit("w", query(kind, ()))
    assert copier.issue() == [(0, 0)]
    copier.complete()
    assert copier.issue() == [(0, 0), (0, 0)]
    assert all(piece.last for piece in copier.in_flight)


def test_a_dropped_query_hands_out_nothing_more() -> None:
    copier = FakeCopier(depth=1)
    copier.arbiter.submit("w", query("stream", (1, 2, 3)))
    copier.arbiter.submit("w", query("stream", (8,)))
    copier.issue()
    copier.arbiter.drop(copier.in_flight[0].query)
    copier.complete()
    assert copier.issue() == [(8, 1)]
    copier.arbiter.drop(copier.in_flight[0].query)  # all of it is handed out: nothing to drop
    copier.complete()
    assert copier.issue() == []


def test_a_dropped_worker_keeps_only_what_is_in_flight() -> None:
    copier = FakeCopier(depth=1)
    for kind in KINDS:
        copier.arbiter.submit("gone", query(kind, (1, 3)))
        copier.arbiter.submit("stays", query(kind, (2,)))
    piece = copier.arbiter.next()
    assert piece is not None and piece.worker == "gone" and copier.arbiter.in_flight("gone") == 1
    assert [q.kind for q in copier.arbiter.drop_worker("gone")] == list(KINDS)
    copier.arbiter.completed(piece)
    assert copier.arbiter.in_flight("gone") == 0
    while copier.issue():
        assert {p.worker for p in copier.in_flight} == {"stays"}
        copier.complete()
    assert copier.order == [(2, 1)] * 3


pairs = st.lists(st.integers(0, 12), unique=True, max_size=8).map(sorted)
submissions = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(KINDS), pairs, st.integers(0, 3))


@settings(max_examples=300)
@given(st.lists(st.one_of(submissions, st.just("next"), st.integers(0, 5)), max_size=40), st.integers(1, 3))
def test_rules_hold_for_any_interleaving(events: list[object], depth: int) -> None:
    """Every pair exactly once, in its query's order; no background while demand is outstanding; all of it ends."""
    arbiter = Arbiter(depth)
    submitted: list[tuple[str, CopyQuery]] = []
    unissued: Counter[int] = Counter()  # pairs of demand queries not handed out, by flag
    in_flight: list[Piece] = []
    issued: dict[int, list[tuple[int, int]]] = {}
    finished: list[int] = []

    def take() -> bool:
        piece = arbiter.next()
        if piece is None:
            return False
        if piece.stream == "background":
            assert not +unissued and not any(p.stream == "demand" for p in in_flight)
            assert piece.count <= 1 and sum(p.stream == "background" for p in in_flight) < depth
        else:
            unissued[piece.query.flag] -= max(piece.count, 1)
        flag = piece.query.flag
        assert flag not in finished
        issued.setdefault(flag, []).extend((piece.first_expert + i, piece.first_slot + i) for i in range(piece.count))
        if piece.last:
            finished.append(flag)
        in_flight.append(piece)
        return True

    for event in events:
        if isinstance(event, tuple):
            worker, kind, experts, gap = event
            flag = len(submitted)
            slots = tuple(e + (gap if e > 4 else 0) for e in experts)
            submitted.append((worker, query(kind, tuple(experts), slots, flag)))
            arbiter.submit(*submitted[-1])
            if kind == "demand":
                unissued[flag] = max(len(experts), 1)
        elif event == "next":
            take()
        elif in_flight:
            assert isinstance(event, int)
            arbiter.completed(in_flight.pop(event % len(in_flight)))
    while take() or in_flight:
        if in_flight:
            arbiter.completed(in_flight.pop(0))
    assert {flag: list(zip(q.experts, q.slots, strict=True)) for flag, (_, q) in enumerate(submitted)} == {
        flag: issued[flag] for flag in range(len(submitted))
    }
    assert sorted(finished) == list(range(len(submitted)))
    for worker in "ab":
        for kind in KINDS:  # first come, first served
            of_kind = [q.flag for w, q in submitted if q.kind == kind]
            assert [flag for flag in finished if flag in of_kind] == of_kind
        assert arbiter.in_flight(worker) == 0
