"""What the model thought and what it says, against hand-written splits and against regular expressions."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.http.markers import LAYOUT_CHARS
from scheduler.http.reasoning import ReasoningSplitter
from tests.scheduler.http.cuts import cut, cuts, texts_of

TEXTS = texts_of("<think>", "</think>", "<tool_call>", "\n<function=f>", "hm")


def split(pieces: list[str], opened: bool, function: str = "") -> tuple[str, str]:
    splitter = ReasoningSplitter(opened, function)
    parts = [*map(splitter.push, pieces), splitter.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("", False, "", ""),
        ("", True, "", ""),
        ("hello", False, "", "hello"),
        (" hello <think>a</think>", False, "", " hello <think>a</think>"),
        ("<think>\na\n</think>\n\nb", False, "\na\n", "\n\nb"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("<think></think>", False, "", ""),
        ("<think>cut of", False, "cut of", ""),
        ("<think>cut of</thi", False, "cut of</thi", ""),
        ("<thi", False, "", "<thi"),
        ("<thinking>", False, "", "<thinking>"),
        ("a</think>b</think>c", False, "", "a</think>b</think>c"),
        ("a\n</think>\n\nb</think>", True, "a\n", "\n\nb</think>"),
        (" a", True, " a", ""),
        ("\n<think>a</think>b", True, "a", "b"),
        ("a<tool_call>\n<function=f>", True, "a<tool_call>\n<function=f>", ""),
    ],
)  # fmt: skip
def test_what_is_thought_and_said(text: str, opened: bool, reasoning: str, content: str) -> None:
    assert split([text], opened) == (reasoning, content)
    assert split(list(text), opened) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("a<tool_call>\n<function=f>", "a", "<tool_call>\n<function=f>"),
        ("say <tool_call> then<tool_call> <function=f>", "say <tool_call> then", "<tool_call> <function=f>"),
        ("a<tool_call>\n<func</think>b", "a<tool_call>\n<func", "b"),
        ("a</think>b<tool_call>\n<function=f>", "a", "b<tool_call>\n<function=f>"),
        ("a<tool_call>\n", "a<tool_call>\n", ""),
    ],
)
def test_a_call_ends_the_thinking(text: str, reasoning: str, content: str) -> None:
    assert split([text], True, "<function=") == (reasoning, content)
    assert split(list(text), True, "<function=") == (reasoning, content)


def test_how_many_blanks_stand_beside_markers() -> None:
    """LAYOUT_CHARS of them, and one more."""
    gap = " " * LAYOUT_CHARS
    assert split([*gap, "<think>a"], False) == ("a", "")
    assert split([*gap, " ", "<think>a"], False) == ("", f"{gap} <think>a")
    assert split(["<tool_call>", *gap, "<function=f>"], True, "<function=") == ("", f"<tool_call>{gap}<function=f>")
    assert split(["<tool_call>", *gap, " ", "<function=f>"], True, "<function=")[1] == ""


@given(TEXTS, st.booleans(), st.booleans(), cuts())
def test_cuts_do_not_matter(text: str, opened: bool, calls: bool, places: list[int]) -> None:
    """Against the text in one piece, and what that gives against regular expressions over the whole text."""
    function = "<function=" if calls else ""
    whole = split([text], opened, function)
    assert split(cut(text, places), opened, function) == whole
    if (begun := re.match(r"\s*<think>", text)) or opened:
        rest = text[begun.end() :] if begun else text
        ends = [m.start() for m in re.finditer(r"</think>|<tool_call>(?=\s*<function=)" if calls else "</think>", rest)]
        end = ends[0] if ends else len(rest)
        assert whole == (rest[:end], rest[end:].removeprefix("</think>"))
    else:
        assert whole == ("", text)


@given(TEXTS, st.booleans())
def test_no_more_is_held_back_than_a_marker_and_its_blanks(text: str, opened: bool) -> None:
    """Against the text so far: what has not come out yet begins a marker."""
    splitter = ReasoningSplitter(opened)
    out = ""
    for count, character in enumerate(text, start=1):
        out += "".join(splitter.push(character))
        left = len(re.sub("</?think>", "", text[:count])) - len(re.sub("</?think>", "", out))
        assert left <= len("</think>") + (0 if text[:count].strip() else count)
