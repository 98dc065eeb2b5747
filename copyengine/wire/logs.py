"""Where log lines go: standard error, one line each, with the process's name."""

import logging
import sys
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]

ERASE_LINE = "\r\x1b[K"
"""Clears a terminal's line, of which a live line may have been drawn by another process."""


def configure_logging(level: LogLevel, process: str) -> None:
    """Send this process's log lines of `level` and above to standard error."""
    logging.basicConfig(
        level=level.upper(), format=f"{_erase()}%(asctime)s %(levelname)s {process} %(name)s: %(message)s", force=True
    )


def _erase() -> str:
    return ERASE_LINE if sys.stderr is not None and sys.stderr.isatty() else ""
