"""How loading goes on, on standard error: a live line on a terminal, else a line at each phase's start and end."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from copyengine.wire.lifecycle import Progress
from copyengine.wire.logs import ERASE_LINE

BAR_COLUMNS = 30
STEADY_S = 1.0
"""After which what is left may be told from what is done."""


class _Phase:
    """What one worker, or the copy engine for all of them, is loading."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.seen = Progress(name, 0, 0)
        self._start = self._now = now

    def update(self, seen: Progress, now: float) -> None:
        """So much is through now. Of the copy engine's, which several workers pass on, what is old is left out."""
        if seen.done_nbytes >= self.seen.done_nbytes:
            self.seen, self._now = seen, now

    @property
    def is_over(self) -> bool:
        """All of it is through."""
        return self.seen.done_nbytes >= self.seen.total_nbytes

    def bar(self) -> str:
        """A bar, and `numbers`."""
        share = self.seen.done_nbytes / max(1, self.seen.total_nbytes)
        filled = min(BAR_COLUMNS, int(BAR_COLUMNS * share))
        return f"{self.name} [{'#' * filled}{'.' * (BAR_COLUMNS - filled)}] {self.numbers()}"

    def numbers(self) -> str:
        """Percent, megabytes, rate, and the seconds that it still takes at that rate."""
        done, total, took = self.seen.done_nbytes, self.seen.total_nbytes, self._now - self._start
        text = f"{done / max(1, total):4.0%}  {done / 1e6:,.0f} of {total / 1e6:,.0f} MB{self._rate()}"
        return text + (f"  {took * (total - done) / done:,.0f} s left" if done and took > STEADY_S else "")

    def end(self) -> str:
        """What remains to be said."""
        took = f" in {self._now - self._start:,.1f} s" if self._rate() else ""
        return f"{self.name}: {self.seen.done_nbytes / 1e6:,.0f} MB{took}{self._rate()}"

    def _rate(self) -> str:
        took = self._now - self._start
        return f"  {self.seen.done_nbytes / took / 1e9:.2f} GB/s" if took >= STEADY_S / 10 else ""


class ProgressLine:
    """The phases that are under way; of several workers each by its name."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Standard error, unless a `stream` is given."""
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._live = self._stream.isatty()
        self._phases: dict[str, _Phase] = {}  # by worker; "": for all
        self._over: set[tuple[str, str]] = set()

    def show(self, seen: Progress) -> None:
        """So much is through."""
        with contextlib.suppress(OSError):  # the terminal is gone, and we serve on without it
            self._show(seen, self._clock())
            self._stream.flush()

    def _show(self, seen: Progress, now: float) -> None:
        worker, name = seen.worker, f"{seen.worker} {seen.phase}".lstrip()
        phase = self._phases.get(worker)
        if seen.done_nbytes == 0:
            self._over.discard((worker, name))
        if (worker, name) in self._over:
            return
        if phase is None or phase.name != name:
            if phase is not None:
                self._end(worker, phase)
            phase = self._phases[worker] = _Phase(name, now)
            if not self._live and seen.done_nbytes < seen.total_nbytes:
                self._stream.write(f"{name}: {seen.total_nbytes / 1e6:,.0f} MB\n")
        phase.update(seen, now)
        if phase.is_over:
            self._end(worker, phase)
        self._draw()

    def _end(self, worker: str, phase: _Phase) -> None:
        """The phase is over: all of it is through, or the next one has begun."""
        del self._phases[worker]
        self._over.add((worker, phase.name))
        self._stream.write(f"{ERASE_LINE if self._live else ''}{phase.end()}\n")

    def _draw(self) -> None:
        """The live line: a bar where there is one phase, or else each one's numbers; no longer than the terminal."""
        phases = list(self._phases.values())
        if self._live and phases:
            several = " | ".join(f"{phase.name} {phase.numbers().lstrip()}" for phase in phases)
            text = phases[0].bar() if len(phases) == 1 else several
            self._stream.write(f"{ERASE_LINE}{text[: shutil.get_terminal_size().columns - 1]}")
