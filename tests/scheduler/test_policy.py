"""The step policy and the split of figures against their rules."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy import StepKind, apportion, least_loaded, next_kind


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_nobody_who_waits_is_passed_over_twice(steps: list[tuple[bool, bool]]) -> None:
    last: StepKind = "decode"
    passed = {"prefill": 0, "decode": 0}
    for prefilling, decoding in steps:
        kind = next_kind(prefilling, decoding, last)
        assert (kind is None) == (not prefilling and not decoding)
        for waits, name in ((prefilling, "prefill"), (decoding, "decode")):
            passed[name] = passed[name] + 1 if waits and kind != name else 0
            assert passed[name] <= 1
        if kind:
            last = kind


@given(st.integers(0, 10**12), st.lists(st.integers(0, 5000), min_size=1, max_size=9))
def test_shares_add_up_and_differ_from_the_exact_share_by_less_than_one(total: int, weights: list[int]) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total
    if whole := sum(weights):
        assert all(abs(share * whole - total * weight) < whole for share, weight in zip(shares, weights, strict=True))
        assert all(share == 0 for share, weight in zip(shares, weights, strict=True) if weight == 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_the_first_of_the_least_loaded_is_chosen(loads: list[int]) -> None:
    assert least_loaded(loads) == loads.index(min(loads))
