"""Against the union of intervals, by hand and counted second by second."""

from hypothesis import given
from hypothesis import strategies as st

from copyengine.busy_clock import BusyClock


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_overlaps_counts_once() -> None:
    clock = Clock()
    busy = BusyClock(clock)
    assert busy.end(7) is None, "it never began"
    told = []
    for now_s, call, number in [
        (100, busy.begin, 1), (102, busy.begin, 2), (103, busy.end, 1), (103, busy.end, 1), (105, busy.end, 2),
        (110, busy.begin, 1), (110.5, busy.end, 1), (111, busy.end, 1),
    ]:  # fmt: skip
        clock.now_s = now_s
        told.append(call(number))
    assert told == [None, None, None, None, 5_000_000, None, 5_500_000, None]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8))
def test_any_intervals(spans: list[tuple[int, int]]) -> None:
    """The seconds in which one of them is open."""
    clock = Clock()
    busy = BusyClock(clock)
    told = 0
    for second in range(41):
        clock.now_s = float(second)
        for number, (start, _) in enumerate(spans):
            if second == start:
                busy.begin(number)
        for number, (start, length) in enumerate(spans):
            if second == start + length:
                told = busy.end(number) or told
    assert told == 1_000_000 * len({s for start, length in spans for s in range(start, start + length)})
