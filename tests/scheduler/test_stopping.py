"""The stop matcher against a brute-force search in the whole text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.detokenize import Detokenizer
from scheduler.stopping import StopMatcher
from tests.scheduler.rig import CORPUS, train_tokenizer

LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


TOKENIZER = train_tokenizer(CORPUS)
PARTS = st.sampled_from(["the ", "fox", "é", "日本", "🦊", "👩\u200d🚀", "aaaa", "a", " b", "e\u0301"])
TEXTS = st.lists(PARTS, min_size=1).map("".join)


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


@given(TEXTS, st.data())
def test_a_stop_string_is_found_wherever_the_tokens_part(text: str, data: st.DataObject) -> None:
    """Stops that begin and end anywhere, in the midst of tokens and characters of several tokens."""

    def part() -> str:
        first = data.draw(st.integers(0, len(text) - 1))
        return text[first : data.draw(st.integers(first + 1, len(text)))]

    stops = [part() for _ in range(data.draw(st.integers(0, 3)))]
    detokenizer, matcher = Detokenizer(TOKENIZER, frozenset()), StopMatcher(stops)
    sent = ""
    for token in TOKENIZER.encode(text).ids:
        sent += matcher.push(detokenizer.push(token))
    sent += matcher.push(detokenizer.flush()) + matcher.flush()
    assert sent == text[: first_match(text, stops)]
    assert matcher.matched == bool(stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "sent"),
    [
        (["the"], ["the", " end"], ["", ""]),
        (["th"], ["a the", " end"], ["a ", ""]),
        (["abcd", "bc"], ["xab", "cd"], ["x", "a"]),
        (["abc", "bcd"], ["xab", "cde"], ["x", ""]),
        (["aab"], ["aaa", "aaab"], ["a", "aaa"]),
        (["ab", "abc"], ["ab", "c"], ["", ""]),
    ],
)
def test_stops_in_the_first_piece_and_stops_that_overlap(stops: list[str], pieces: list[str], sent: list[str]) -> None:
    """Piece by piece against what may be sent, by hand: the first complete match counts, of several the longest."""
    matcher = StopMatcher(stops)
    assert [matcher.push(piece) for piece in pieces] == sent and matcher.matched
