"""The ring against a plain deque, its refusals by hand, and two threads over one buffer."""

import random
import threading
from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from copyengine.busy_clock import BusyClock
from copyengine.protocol import MAX_QUERY
from copyengine.ring import (
    BUSY,
    CELL_WORDS,
    CELLS,
    FLAG,
    KINDS,
    MASK,
    CopyQuery,
    Kind,
    Limits,
    Malformed,
    RingReader,
    RingWriter,
    ring_nbytes,
)
from copyengine.wire.errors import PeerTimeout, WireError

LIMITS = Limits(layers=5, experts=200, slots=300, flags=7)


def buffer(capacity: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(ring_nbytes(capacity), 0xAB, np.uint8)


def query(n: int, flag: int = 0, kind: int = 0, layer: int = 0) -> CopyQuery:
    return CopyQuery(flag, KINDS[kind], layer, tuple(range(n)), tuple(range(100, 100 + n)))


queries = st.builds(
    query, st.sampled_from([0, 1, 2, 127, 128]), st.integers(0, 6), st.integers(0, 2), st.integers(0, 4)
)


class RingMachine(RuleBasedStateMachine):
    """The ring is a deque of `capacity` places. A reader may be replaced at any time; some numbers wrap."""

    @initialize(capacity=st.sampled_from([1, 2, 4, 8]), first=st.sampled_from([0, 5, MASK - 3, MASK]))
    def make(self, capacity: int, first: int) -> None:
        self.array = buffer(capacity)
        self.capacity = capacity
        self.writer = RingWriter(self.array, capacity, first)
        self.reader = RingReader(self.array, LIMITS)
        self.model: deque[CopyQuery] = deque()

    @rule(record=queries)
    def put(self, record: CopyQuery) -> None:
        accepted = self.writer.try_put(record)
        assert accepted == (len(self.model) < self.capacity)
        if accepted:
            self.model.append(record)

    @rule()
    def poll(self) -> None:
        assert self.reader.poll() == (self.model.popleft() if self.model else None)

    @rule()
    def another_reader(self) -> None:
        self.reader = RingReader(self.array, LIMITS)

    @invariant()
    def pending(self) -> None:
        if hasattr(self, "reader"):
            assert self.reader.pending() == bool(self.model)


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=40)


def test_numbers_wrap_at_32_bits() -> None:
    """Ten records across 2^32 come out as they went in."""
    writer = RingWriter(buffer(4), 4, MASK - 4)
    reader = RingReader(writer._words.view(np.uint8), LIMITS)
    for i in range(10):
        assert reader.poll() is None
        assert writer.try_put(query(i))
        assert reader.poll() == query(i)


def test_a_body_without_its_sequence_is_never_seen() -> None:
    """A writer that died after the body, and one that died in its middle."""
    array = buffer(2)
    writer = RingWriter(array, 2)
    reader = RingReader(array, LIMITS)
    words = array.view(np.uint32)
    words[CELLS + FLAG : CELLS + CELL_WORDS] = 1
    assert not reader.pending() and reader.poll() is None
    assert writer.try_put(query(3)) and reader.poll() == query(3)


@pytest.mark.parametrize(
    ("word", "value", "flag"),
    [
        (1, 7, None),
        (2, 3, 2),
        (3, 5, 2),
        (4, MAX_QUERY + 1, 2),
        (4, MASK, 2),
        (16, 200, 2),
        (17, 300, 2),
        (19, MASK, 2),
    ],
)
def test_malformed_records_are_refused(word: int, value: int, flag: int | None) -> None:
    """One word at a time just past its limit: flag, kind, layer, n, expert, slot. The record after it is fine."""
    array = buffer(2)
    writer, reader = RingWriter(array, 2), RingReader(array, LIMITS)
    assert writer.try_put(query(2, flag=2, kind=1, layer=4))
    array.view(np.uint32)[CELLS + word] = value
    bad = reader.poll()
    assert isinstance(bad, Malformed) and bad.flag == flag
    assert writer.try_put(query(1)) and reader.poll() == query(1)


def test_what_is_no_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        RingWriter(buffer(4), 3)
    with pytest.raises(ValueError, match="takes"):
        RingWriter(buffer(4), 8)
    with pytest.raises(WireError, match="no ring"):
        RingReader(np.zeros(10, np.uint8), LIMITS)
    with pytest.raises(WireError, match="no ring"):
        RingReader(np.zeros(4096, np.uint8), LIMITS)
    for word, value, why in [
        (1, 1, "version"),
        (3, 64, "64"),
        (2, 0, "0 records"),
        (2, 4, "4 records"),
        (2, 3, "3 rec"),
    ]:
        array = buffer(2)
        RingWriter(array, 2)
        array.view(np.uint32)[word] = value
        with pytest.raises(WireError, match=why):
            RingReader(array, LIMITS)


def test_a_full_ring_waits_with_a_deadline_and_a_check() -> None:
    array = buffer(1)
    writer = RingWriter(array, 1)
    writer.put(query(1), 0.05, lambda: None)
    with pytest.raises(PeerTimeout, match=r"0\.05 s"):
        writer.put(query(2), 0.05, lambda: None)

    def released() -> None:
        raise KeyError("released")

    with pytest.raises(KeyError):
        writer.put(query(2), 60, released)
    assert RingReader(array, LIMITS).poll() == query(1)


def test_two_threads_lose_and_change_nothing() -> None:
    """1,500 records of random sizes through 8 places, against the list of them."""
    rng = random.Random(0)
    sent = [
        query(rng.choice([0, 1, 5, 128]), rng.randrange(7), rng.randrange(3), rng.randrange(5)) for _ in range(1500)
    ]
    array = buffer(8)
    writer, reader = RingWriter(array, 8, MASK - 100), RingReader(array, LIMITS)

    def write() -> None:
        for record in sent:
            writer.put(record, 20, lambda: None)

    thread = threading.Thread(target=write)
    thread.start()
    got: list[CopyQuery | Malformed] = []
    while len(got) < len(sent) and (thread.is_alive() or reader.pending()):
        record = reader.poll()
        if record is not None:
            got.append(record)
    thread.join()
    assert got == sent


def test_asleep_and_step_are_seen_by_the_other_side() -> None:
    """The two words of the sleeping rule, one side after the other."""
    array = buffer(1)
    writer, reader = RingWriter(array, 1), RingReader(array, LIMITS)
    assert not reader.step_runs() and not writer.begin_step() and reader.step_runs()
    writer.end_step()
    reader.set_asleep(True)
    assert not reader.step_runs() and writer.begin_step() and reader.step_runs()
    assert RingReader(array, LIMITS).step_runs()
    assert not writer.begin_step()  # a new reader is awake


def test_the_writer_learns_how_long_its_queries_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for those under way together, not for prefetch, across the word's end, and across a change of readers."""
    now_s = [50.0]
    monkeypatch.setattr("copyengine.ring.BusyClock", lambda: BusyClock(lambda: now_s[0]))
    array = buffer(4)
    writer = RingWriter(array, 4)
    array.view(np.uint32)[BUSY] = MASK - 2_499_999  # 2.5 s before it begins anew
    assert writer.busy_us() == MASK - 2_499_999

    def rung(reader: RingReader, flag: int, kind: Kind = "demand") -> None:
        assert writer.try_put(CopyQuery(flag, kind, 0, (1,), (1,)))
        assert reader.poll() is not None

    reader = RingReader(array, LIMITS)
    rung(reader, 0)
    now_s[0] += 1
    rung(reader, 1, "stream")
    now_s[0] += 1
    reader.over(0)
    assert writer.busy_us() == 0, "another one is under way"
    reader.over(1)
    reader.over(1)
    assert writer.busy_us() == 2_000_000
    rung(reader, 2, "prefetch")
    now_s[0] += 1
    reader.over(2)
    assert writer.busy_us() == 0
    reader = RingReader(array, LIMITS)
    rung(reader, 0)
    now_s[0] += 1
    reader.over(0)
    assert writer.busy_us() == 1_000_000 and int(array.view(np.uint32)[BUSY]) == 500_000
