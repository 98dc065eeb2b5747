"""Where log lines go: standard error, one line each, with the process's name."""

import logging
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logging(level: LogLevel, process: str) -> None:
    """Send this process's log lines of `level` and above to standard error."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s", force=True
    )
