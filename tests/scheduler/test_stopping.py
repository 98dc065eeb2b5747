"""The stop matcher against a brute-force search in the whole text."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from scheduler.stopping import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


def first_match(text: str, stops: list[str]) -> int | None:
    """Where the answer ends: the match complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 24), max_size=8))
def test_any_cut_of_the_text_yields_what_a_search_in_the_whole_yields(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(piece) for piece in pieces_of(text, cuts)) + matcher.flush()
    end = first_match(text, stops)
    assert matcher.matched == (end is not None)
    assert sent == text[:end]


@given(LETTERS, STOPS)
def test_only_what_may_begin_a_match_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for read, character in enumerate(text, start=1):
        sent += matcher.push(character)
        if matcher.matched:
            return
        held = text[len(sent) : read]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push("one EN"), matcher.push("D two"), matcher.push("three"), matcher.flush()] == [
        "one ",
        "",
        "",
        "",
    ]
