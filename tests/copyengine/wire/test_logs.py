"""The log's lines: their form word for word, and read back by tests/log_lines.py, which states the form once more."""

import io
import logging
import re
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyengine.wire.logs import ERASE_LINE, MAX_FRAMES, MAX_VALUE_CHARS, Log, configure_logging, event_text, place_of
from tests.log_lines import LogLine, parse

AT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
HEAD = "2026-01-01 00:00:00,000 INFO worker0 a: "


class Stderr(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], Stderr]]:
    """Begins a log at level info; what it goes to, a terminal or not."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # or else they would be closed

    def begin(terminal: bool) -> Stderr:
        stderr = Stderr(terminal)
        monkeypatch.setattr(sys, "stderr", stderr)
        configure_logging("info", "worker0")
        return stderr

    yield begin
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_on_a_terminal_erases_what_is_drawn_there(written: Callable[[bool], Stderr], terminal: bool) -> None:
    stderr = written(terminal)
    Log("some.module").info("ready", url="http://127.0.0.1:1/v1", took_s=0.25, count=3)
    Log("some.module").debug("not_shown")
    erase = ERASE_LINE if terminal else ""
    text = r" INFO worker0 some\.module: event=ready url=http://127\.0\.0\.1:1/v1 took_s=0\.25 count=3\n"
    assert re.fullmatch(re.escape(erase) + AT + text, stderr.getvalue())


def recursing(depth: int) -> None:
    if depth == 0:
        raise ValueError("what a\nclient said")
    recursing(depth - 1)


def error_of(depth: int) -> ValueError:
    try:
        recursing(depth)
    except ValueError as error:
        return error
    raise AssertionError


def test_an_error_is_one_line_of_type_and_place_and_of_words_only_where_they_are_wanted(
    written: Callable[[bool], Stderr],
) -> None:
    stderr = written(False)
    log = Log("m")
    log.failed("a_failed", error_of(1), words=False, id="x")
    log.failed("b_failed", error_of(50), words=True)
    first, second = (parse(line) for line in stderr.getvalue().splitlines())
    assert first and second and first.level == "ERROR"
    assert first.fields.keys() == {"id", "error", "at"} and first.fields["error"] == "ValueError"
    at = r"wire/test_logs\.py:\d+ "
    assert re.fullmatch(f"{at}error_of > {at}recursing > {at}recursing", first.fields["at"])
    assert second.fields["detail"] == "what a\nclient said" and "client" not in first.fields["at"]
    assert second.fields["at"].count(" > ") == MAX_FRAMES - 1
    assert place_of(ValueError()) == "unknown"


def test_what_libraries_log_has_the_same_form_and_no_words_of_exceptions(
    written: Callable[[bool], Stderr],
) -> None:
    """Also one that pretends to be an event of ours."""
    stderr = written(False)
    try:
        raise KeyError("secret")
    except KeyError:
        logging.getLogger("asyncio").exception("Task %s\nfailed", "\x1b[2J")
    logging.getLogger("other").error("event=death detail=no")
    first, second = (parse(line) for line in stderr.getvalue().splitlines())
    assert first and first.logger == "asyncio" and first.event == "library" and first.fields["error"] == "KeyError"
    assert first.fields["text"] == "Task \x1b[2J\nfailed" and "secret" not in stderr.getvalue()
    assert second and (second.event, second.fields) == ("library", {"text": "event=death detail=no"})


@given(st.lists(st.text(max_size=60) | st.integers() | st.floats(allow_nan=False), max_size=4))
def test_any_value_can_be_read_back_and_none_breaks_the_line(values: list[str | int | float]) -> None:
    fields = {f"key{i}": value for i, value in enumerate(values)}
    text = event_text("some_event", fields)
    assert text.isascii() and text.isprintable()
    told = {key: f"{value:.6g}" if isinstance(value, float) else str(value) for key, value in fields.items()}
    assert parse(HEAD + text) == LogLine("INFO", "worker0", "a", "some_event", told)


def test_a_long_value_is_cut() -> None:
    exact, longer = "a" * MAX_VALUE_CHARS, "a" * (MAX_VALUE_CHARS + 1)
    assert event_text("e", {"a": exact}) == f"event=e a={exact}"
    assert event_text("e", {"a": longer}) == f"event=e a={exact[:-3]}..."


@pytest.mark.parametrize("text", ["", "event=a b", "b=c event=a", "event=a b=c b=d", "event=a b=c  d=e", 'event=a b="'])
def test_another_form_is_no_line(text: str) -> None:
    with pytest.raises(AssertionError):
        parse(HEAD + text)
