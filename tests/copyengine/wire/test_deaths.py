"""Deaths in a row, against a count of all deaths since the last quiet stretch, looked up in the whole history."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyengine.wire.deaths import MOST_DEATHS, MOST_PAUSE_S, QUIET_S, DeathCount, how_it_ended

Happenings = list[tuple[bool, float]]
"""Each a death or that all serve, and the seconds since the one before."""


def row(history: list[tuple[bool, float]], quiet_s: float) -> list[float]:
    """When the deaths of the last row happened. `history` has what happened and when, oldest first."""
    deaths = [at for died, at in history if died]
    for i in range(len(history) - 1, 0, -1):
        (died, at), (was_death, served) = history[i], history[i - 1]
        if died and not was_death and at - served >= quiet_s:
            return [death for death in deaths if death >= at]
    return deaths


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.5, 59.5, 60.0, 61.0])), max_size=30))
def test_a_row_is_what_no_quiet_stretch_parts(happenings: Happenings) -> None:
    count, history, now = DeathCount(), list[tuple[bool, float]](), 0.0
    for died, later in happenings:
        now += later
        history.append((died, now))
        if died:
            count.died(f"at {now}", now)
            expected = row(history, QUIET_S)
            assert count.in_a_row == len(expected)
            assert count.first_cause == f"at {expected[0]}"
            assert count.too_many == (len(expected) >= MOST_DEATHS)
        else:
            count.served(now)


def test_what_is_said_at_the_end_names_the_first_cause() -> None:
    count = DeathCount()
    for i in range(5):
        assert not count.too_many
        count.died(f"cause {i}", i)
    assert count.too_many and count.summary == "given up after 5 deaths in a row; the first: cause 0"


def test_pauses_grow_to_a_bound_and_a_row_without_an_end_is_never_too_many() -> None:
    count, pauses = DeathCount(most=None), []
    for i in range(2000):
        count.died(f"cause {i}", i)
        pauses.append(count.pause_s)
        assert not count.too_many
    assert pauses[:7] == [0, 1, 2, 4, 8, 16, 16] and set(pauses[7:]) == {MOST_PAUSE_S}
    assert count.ordinal == "death 2000 in a row; after a pause of 16 s"
    few = DeathCount()
    few.died("a cause", 0)
    assert few.ordinal == "death 1 in a row; 5 give up"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-signal.SIGTERM, "was killed by SIGTERM"),
        (-99, "was killed by signal 99"),
    ],
)
def test_an_exit_code_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words
