"""The log: standard error, one line for each event, the same form in all processes.

```text
2026-11-30 12:48:04,073 WARNING launch launch: event=death detail="worker0 was killed by SIGKILL; ..."
date       time         level   process logger  event=NAME and then key=value, quoted as JSON does unless plain
```
Values hold no line's end and nothing that a terminal obeys, whoever chose them. Prompts, answers, token ids, keys and
templates are in none: modules give no such value, and of exceptions that may quote one only type and place are told.
Lines of libraries come as event=library.
"""

import json
import logging
import re
import sys
import traceback
from pathlib import PurePath
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
Value = str | int | float

ERASE_LINE = "\r\x1b[K"
"""Clears a terminal's line, of which a live line may have been drawn by another process."""

MAX_VALUE_CHARS = 2000
"""A longer value is cut: the longest of ours, a start's refusal with its remedy, has some hundred. Without a bound one
line could be as long as what a client or a file sends."""

MAX_FRAMES = 16
"""Of an exception's place the innermost ones: deeper recursion repeats itself."""

_PLAIN = re.compile(r"[\w.:+/-]+", re.ASCII)
_EVENT = "slotstream_event"


class Log:
    """A module's events: `log = Log(__name__)`, then `log.info("NAME", key=value, ...)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: Value) -> None:
        """Of use only when something is looked for."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Value) -> None:
        """Something happened as it should."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Value) -> None:
        """Something is not as it should be, and all goes on."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Value) -> None:
        """Something failed."""
        self._write(logging.ERROR, event, fields)

    def failed(self, event: str, error: BaseException, /, words: bool, **fields: Value) -> None:
        """Something failed in a way that nobody foresaw: an error's type and place. Its own `words` may be logged
        only where it has seen nothing of a request."""
        told: dict[str, Value] = {"error": type(error).__name__}
        if words:
            told["detail"] = str(error)
        self._write(logging.ERROR, event, {**fields, **told, "at": place_of(error)})

    def _write(self, level: int, event: str, fields: dict[str, Value]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event_text(event, fields), extra={_EVENT: True})


def event_text(event: str, fields: dict[str, Value]) -> str:
    """`event=NAME key=value ...`, in the order given."""
    return " ".join((f"event={event}", *(f"{key}={quoted(value)}" for key, value in fields.items())))


def quoted(value: Value) -> str:
    """As it stands if it is plain, else as JSON in ASCII; no more than MAX_VALUE_CHARS of it."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > MAX_VALUE_CHARS:
        text = f"{text[: MAX_VALUE_CHARS - 3]}..."
    return text if _PLAIN.fullmatch(text) else json.dumps(text).replace("\x7f", "\\u007f")


def place_of(error: BaseException) -> str:
    """Where it was raised, outermost first, without a word of what was there: `file:line function > ...`."""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    return " > ".join(f"{'/'.join(PurePath(f.filename).parts[-2:])}:{f.lineno} {f.name}" for f in frames) or "unknown"


class Lines(logging.Formatter):
    """One line for each record. One that is no event of ours, a library's, becomes event=library; its exception is
    told as type and place."""

    def __init__(self, process: str, terminal: bool) -> None:
        erase = ERASE_LINE if terminal else ""
        super().__init__(f"{erase}%(asctime)s %(levelname)s {process} %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        if getattr(record, _EVENT, False):
            return super().format(record)
        fields: dict[str, Value] = {"text": record.getMessage()}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields |= {"error": type(error).__name__, "at": place_of(error)}
        told = logging.LogRecord(record.name, record.levelno, "", 0, event_text("library", fields), None, None)
        told.created, told.msecs = record.created, record.msecs
        return super().format(told)


def configure_logging(level: LogLevel, process: str) -> None:
    """Send this process's log lines of `level` and above to standard error."""
    logging.basicConfig(level=level.upper(), force=True)
    terminal = sys.stderr is not None and sys.stderr.isatty()
    for handler in logging.getLogger().handlers:
        handler.setFormatter(Lines(process, terminal))
