"""Against the rule: over when all who were asked have ended, or with a second signal; anything else that ends is an
error."""

import pytest

from copyengine.wire.child import Exited, Told
from copyengine.wire.draining import Draining


def test_it_is_over_when_all_who_were_asked_have_ended_well() -> None:
    draining = Draining(["scheduler", "http"])
    assert draining.take(Exited("scheduler", 0)) == "" and not draining.over
    assert draining.take(Exited("http", 0)) == "" and draining.over
    assert draining.code == 0


@pytest.mark.parametrize(("name", "over"), [("http", True), ("worker0", False)])
def test_an_end_that_is_none_of_these_is_said_and_counts(name: str, over: bool) -> None:
    draining = Draining(["http"])
    assert draining.take(Exited(name, 3)) == f"{name} ended with exit code 3 while draining"
    assert (draining.over, draining.code) == (over, 1)


def test_one_that_was_not_asked_should_not_end_at_all_unless_it_was_told_to() -> None:
    draining = Draining(["http"])
    assert draining.take(Exited("worker0", -9), expected=True) == "" and draining.code == 0
    assert draining.take(Exited("worker0", 0)) and draining.code == 1


def test_a_second_signal_ends_it() -> None:
    draining = Draining(["http"])
    draining.take(Told("SIGTERM"))
    assert draining.over and draining.hurried and draining.code == 0


def test_nobody_to_wait_for() -> None:
    assert Draining([]).over
