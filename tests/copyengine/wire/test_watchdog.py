"""Who is asked and who is given up, against a simulation of processes of which each answers or does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyengine.wire.watchdog import ASK_S, LATE_S, OwnTime, Watchdog

PATIENCE_S = 20.0
TURN_S = 0.25
NAMES = ("worker0", "scheduler", "http")


def run(
    watchdog: Watchdog, seconds: float, hangs_from_s: dict[str, float], answers_in_s: float = 0.1
) -> dict[str, float]:
    """Turn as the supervisor does; when each was given up."""
    given_up: dict[str, float] = {}
    asked: dict[str, float] = {}
    for turn in range(int(seconds / TURN_S)):
        now_s = turn * TURN_S
        for name, at in list(asked.items()):
            if now_s >= at + answers_in_s and at + answers_in_s < hangs_from_s.get(name, seconds):
                watchdog.heard(name, now_s)
                del asked[name]
        look = watchdog.look(NAMES, now_s)
        assert not asked.keys() & set(look.ask), "a second question before the first has its answer"
        asked.update(dict.fromkeys(look.ask, now_s))
        for name in look.silent:
            assert name not in given_up, "said once"
            given_up[name] = now_s
    return given_up


@given(st.dictionaries(st.sampled_from(NAMES), st.floats(0, 100)), st.floats(0, PATIENCE_S - 2 * TURN_S))
def test_who_hangs_is_given_up_in_time_and_nobody_else(hangs_from_s: dict[str, float], answers_in_s: float) -> None:
    """Not before its patience has passed since it hung, and not later than that, a question's distance and two turns;
    however slowly those answer who do."""
    given_up = run(Watchdog(PATIENCE_S), 100 + 2 * PATIENCE_S + ASK_S, hangs_from_s, answers_in_s)
    assert given_up.keys() == hangs_from_s.keys()
    for name, at in given_up.items():
        late = at - hangs_from_s[name] - PATIENCE_S
        assert -answers_in_s - TURN_S <= late <= ASK_S + 2 * TURN_S


def test_without_patience_nobody_is_asked() -> None:
    assert Watchdog(0).look(NAMES, 0) == ([], [])


def test_another_process_of_the_same_name_is_asked_anew() -> None:
    """It owes no answer to what the one before was asked, nor is it given up with that one."""
    watchdog = Watchdog(PATIENCE_S)
    assert watchdog.look(["worker0"], 0) == (["worker0"], [])
    assert watchdog.look(["worker0"], PATIENCE_S) == ([], ["worker0"])
    assert watchdog.look(["worker0"], 3 * PATIENCE_S) == ([], []), "it is being killed"
    assert watchdog.look([], 3 * PATIENCE_S) == ([], [])
    assert watchdog.look(["worker0"], 4 * PATIENCE_S) == (["worker0"], [])
    watchdog.heard("worker0", 4 * PATIENCE_S)
    watchdog.heard("worker0", 4 * PATIENCE_S)  # said by itself: it means nothing
    watchdog.heard("scheduler", 4 * PATIENCE_S)
    assert watchdog.look(["worker0", "scheduler"], 4 * PATIENCE_S + ASK_S) == (["worker0", "scheduler"], [])


@given(st.lists(st.floats(0, 1000), max_size=30))
def test_own_time_counts_no_stretch_in_which_nobody_looked(gaps_s: list[float]) -> None:
    """Against the sum of what each stretch may count."""
    readings = iter([0.0, *(sum(gaps_s[: i + 1]) for i in range(len(gaps_s)))])
    own = OwnTime(lambda: next(readings))
    seen = [own() for _ in gaps_s]
    expected = [sum(min(gap, LATE_S) for gap in gaps_s[: i + 1]) for i in range(len(gaps_s))]
    assert seen == pytest.approx(expected)
