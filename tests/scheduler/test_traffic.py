"""The split of figures against exact shares, sums by hand. Shares of whole runs add up in test_core.py."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.protocol import ModeCounters
from scheduler.traffic import apportion, plus, split_stats, total
from worker.protocol import ExpertStats


@given(st.integers(0, 10**12), st.lists(st.integers(0, 5000), min_size=1, max_size=9))
def test_shares_add_up_and_differ_from_the_exact_share_by_less_than_one(total: int, weights: list[int]) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total
    if whole := sum(weights):
        assert all(abs(share * whole - total * weight) < whole for share, weight in zip(shares, weights, strict=True))
        assert all(share == 0 for share, weight in zip(shares, weights, strict=True) if weight == 0)


def test_a_request_alone_in_a_step_has_all_of_its_figures() -> None:
    stats = ExpertStats(1, 9, 4, 5, 5 * 640)
    assert split_stats(stats, [128]) == [stats]


def test_sums_are_field_by_field() -> None:
    first = plus(ModeCounters(), ExpertStats(1, 9, 4, 5, 50, 0.5), 2.0)
    counters = plus(first, ExpertStats(1, 3, 2, 1, 10, 0.25), 1.0)
    assert counters == ModeCounters(2, 12, 6, 6, 60, 0.75, 3.0)
    assert total([counters, ModeCounters(), counters]) == ModeCounters(4, 24, 12, 12, 120, 1.5, 6.0)
