"""ProgressLine: what is written, against the text that a person should read."""

import io

import pytest

from copyengine.wire.lifecycle import Progress
from copyengine.wire.logs import ERASE_LINE
from scheduler.progress_line import ProgressLine

MB = 10**6


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Line:
    """A ProgressLine under a clock that is set."""

    def __init__(self, terminal: bool) -> None:
        self.now = 0.0
        self.screen = Screen(terminal)
        self.line = ProgressLine(self.screen, lambda: self.now)

    def show(self, now: float, phase: str, done: int, total: int, worker: str = "") -> None:
        self.now = now
        self.line.show(Progress(phase, done * MB, total * MB, worker))


def test_on_a_terminal_one_line_shows_bar_percent_rate_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    line = Line(True)
    line.show(0, "experts", 0, 30_000)
    line.show(2, "experts", 10_000, 30_000)
    line.show(3, "experts", 9_000, 30_000)  # late news
    line.show(6, "experts", 30_000, 30_000)
    assert line.screen.getvalue().split(ERASE_LINE)[1:] == [
        f"experts [{'.' * 30}]   0%  0 of 30,000 MB",
        f"experts [{'#' * 10}{'.' * 20}]  33%  10,000 of 30,000 MB  5.00 GB/s  4 s left",
        f"experts [{'#' * 10}{'.' * 20}]  33%  10,000 of 30,000 MB  5.00 GB/s  4 s left",
        "experts: 30,000 MB in 6.0 s  5.00 GB/s\n",
    ]


def test_a_narrow_terminal_gets_one_line_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    line = Line(True)
    line.show(0, "dense weights", 0, 30_000)
    (text,) = line.screen.getvalue().split(ERASE_LINE)[1:]
    assert len(text) == 39 and text.startswith("dense weights [")


def test_elsewhere_each_phase_has_a_line_at_its_start_and_its_end() -> None:
    """One whose end was not told has ended when the next begins; what two workers pass on is said once."""
    line = Line(False)
    for now, phase, done in ((0, "expert banks", 0), (1, "expert banks", 50), (2, "experts", 0), (2, "experts", 0)):
        line.show(now, phase, done, 100)
    for done in (10, 5, 10, 100, 100):
        line.show(4, "experts", done, 100)
    assert line.screen.getvalue().splitlines() == [
        "expert banks: 100 MB",
        "expert banks: 50 MB in 1.0 s  0.05 GB/s",
        "experts: 100 MB",
        "experts: 100 MB in 2.0 s  0.05 GB/s",
    ]


def test_two_workers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one line while both load; a worker that is started anew says its phases again."""
    monkeypatch.setenv("COLUMNS", "200")
    line = Line(True)
    line.show(0, "dense weights", 0, 100, "worker0")
    line.show(0, "dense weights", 0, 100, "worker1")
    line.show(10, "dense weights", 50, 100, "worker1")
    line.show(11, "dense weights", 100, 100, "worker0")
    line.show(12, "dense weights", 100, 100, "worker1")
    line.show(20, "dense weights", 0, 100, "worker1")
    assert line.screen.getvalue().split(ERASE_LINE)[3:] == [
        "worker0 dense weights 0%  0 of 100 MB | worker1 dense weights 50%  50 of 100 MB  0.01 GB/s  10 s left",
        "worker0 dense weights: 100 MB in 11.0 s  0.01 GB/s\n",
        f"worker1 dense weights [{'#' * 15}{'.' * 15}]  50%  50 of 100 MB  0.01 GB/s  10 s left",
        "worker1 dense weights: 100 MB in 12.0 s  0.01 GB/s\n",
        f"worker1 dense weights [{'.' * 30}]   0%  0 of 100 MB",
    ]


def test_nothing_to_load_is_no_error() -> None:
    line = Line(False)
    line.show(0, "dense weights", 0, 0)
    assert line.screen.getvalue() == "dense weights: 0 MB\n"
