"""Log lines on a terminal and elsewhere, word for word."""

import io
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from copyengine.wire.logs import ERASE_LINE, configure_logging


class Stderr(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # or else they would be closed
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_on_a_terminal_erases_what_is_drawn_there(
    restored: None, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    stderr = Stderr(terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    configure_logging("info", "worker0")
    logging.getLogger("some.module").info("ready")
    logging.getLogger("some.module").debug("not shown")
    erase = ERASE_LINE if terminal else ""
    at = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(re.escape(erase) + at + r" INFO worker0 some\.module: ready\n", stderr.getvalue())
