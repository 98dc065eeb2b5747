"""How loading goes on, on standard error."""

import contextlib
import sys

from copyengine.wire.lifecycle import Progress
from copyengine.wire.logs import ERASE_LINE


class ProgressLine:
    """Shows loading on standard error: one live line on a terminal, else a line at each phase's start and end."""

    def __init__(self) -> None:
        self._phase = ""
        self._live = sys.stderr.isatty()

    def show(self, seen: Progress) -> None:
        """So much is through."""
        finished = seen.done_nbytes >= seen.total_nbytes
        text = f"{seen.phase}: {seen.done_nbytes / 1e6:,.0f} of {seen.total_nbytes / 1e6:,.0f} MB"
        with contextlib.suppress(OSError):  # the terminal is gone, and we serve on without it
            if self._live:
                sys.stderr.write(f"{ERASE_LINE}{text}" + ("\n" if finished else ""))
            elif seen.phase != self._phase or finished:
                sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        self._phase = seen.phase
