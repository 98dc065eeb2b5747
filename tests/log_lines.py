"""Reads the log's lines by the rule that copyengine/wire/logs.py states, written down a second time."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

_HEAD = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) (?P<process>\S+) (?P<logger>\S+): (?P<fields>.*)"
)
_FIELD = re.compile(r'(?P<key>[a-z_0-9]+)=(?P<value>[\w.:+/-]+|"(?:[^"\\]|\\.)*")(?: |$)', re.ASCII)


@dataclass(frozen=True)
class LogLine:
    """One event."""

    level: str
    process: str
    logger: str
    event: str
    fields: dict[str, str]


def parse(line: str) -> LogLine | None:
    """The event in `line`; None for one that is no log line. AssertionError for one whose form is wrong."""
    head = _HEAD.fullmatch(line.removeprefix("\r\x1b[K"))
    if head is None:
        return None
    fields: dict[str, str] = {}
    at, text = 0, head["fields"]
    while at < len(text):
        field = _FIELD.match(text, at)
        assert field, f"no field at {text[at:]!r} in {line!r}"
        assert field["key"] not in fields, f"{field['key']} twice in {line!r}"
        value = field["value"]
        fields[field["key"]] = json.loads(value) if value.startswith('"') else value
        at = field.end()
    assert next(iter(fields), "") == "event", f"no event first in {line!r}"
    return LogLine(head["level"], head["process"], head["logger"], fields.pop("event"), fields)


def events(lines: Iterable[str], name: str = "") -> list[LogLine]:
    """Those of all `lines`, or those called `name`."""
    found = [event for line in lines if (event := parse(line)) is not None]
    return [event for event in found if name in ("", event.event)]
