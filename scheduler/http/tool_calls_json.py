"""Calls written as `<tool_call>`, a JSON object of "name" and "arguments", `</tool_call>`: Qwen3's and Hermes' form."""

import json
import re
from typing import Any

from scheduler.http.markers import after_blanks
from scheduler.http.tool_calls import ToolCallParser

HEAD_CHARS = 1024
"""Within which a call's arguments begin, if they are to be sent while they arrive."""

WHOLE_CHARS = 65_536
"""Of the longest call that is held until it is complete."""

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL)
_OUTSIDE_STRINGS = frozenset(' \t\r\n,:"{}[]+-.0123456789eEtrufalsn')


class JsonToolCalls(ToolCallParser):
    """Arguments come out as they are written, from the moment that name and "arguments" are there.

    A call written otherwise comes out when it is complete, if it is a JSON object with a name and arguments in any
    order: no arguments are none, and a string is taken for the JSON text of an object. That something is no call is
    known once it goes on as no JSON object does, or for WHOLE_CHARS.
    """

    def __init__(self) -> None:
        super().__init__()
        self._object = ObjectEnd()
        self._scanned = 0  # of what is held

    def _call(self) -> bool:
        at = after_blanks(self._held)
        if at == len(self._held):
            return self._ended and self._no_call()
        if self._held[at] != "{":
            return self._no_call()
        self._object, self._scanned = ObjectEnd(), at
        self._step = self._unnamed
        return True

    def _unnamed(self) -> bool:
        """In the call's object, of which neither name nor arguments are known yet."""
        head = _HEAD.match(self._held, 0, HEAD_CHARS) if self._scanned < HEAD_CHARS else None
        if head and (name := _string(head[1])) is not None:
            self._take(head.end())
            self._begin(name)
            self._object = ObjectEnd()
            self._step = self._arguments
            return True
        self._scanned += self._object.scan(self._held[self._scanned : WHOLE_CHARS])
        if self._object.complete:
            return self._whole()
        no_call = self._object.broken or self._scanned == WHOLE_CHARS or self._ended
        return no_call and self._no_call()

    def _whole(self) -> bool:
        """Behind the call's object, all of which is held."""
        call = _whole_call(self._held[: self._scanned])
        if call is None:
            return self._no_call()
        self._take(self._scanned)
        self._begin(call[0])
        self._argue(call[1])
        self._step = self._close
        return True

    def _arguments(self) -> bool:
        count = self._object.scan(self._held)
        self._argue(self._take(count))
        if self._object.broken:
            self._step = self._text
            return True
        if self._object.complete:
            self._step = self._brace
            return True
        return False

    def _brace(self) -> bool:
        """Behind the arguments: the end of the call's object."""
        at = after_blanks(self._held)
        if at == len(self._held):
            return False
        if self._held[at] == "}":
            self._take(at + 1)
        self._step = self._close
        return True


class ObjectEnd:
    """Finds where a JSON object ends in a text that arrives in pieces, by brackets and strings.

    `complete` once it has; `broken` if a character comes that no JSON has there.
    """

    def __init__(self) -> None:
        self.complete = False
        self.broken = False
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False

    def scan(self, text: str) -> int:
        """How many characters of `text`, which follow those before, belong to the object."""
        for count, character in enumerate(text):
            if not self._takes(character):
                self.broken = True
                return count
            if not self._open:
                self.complete = True
                return count + 1
        return len(text)

    def _takes(self, character: str) -> bool:
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return True
        match character:
            case '"':
                self._in_string = True
            case "{" | "[":
                self._open.append("}" if character == "{" else "]")
            case "}" | "]":
                return bool(self._open) and self._open.pop() == character
        return character in _OUTSIDE_STRINGS


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) and value else None


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is there as a whole."""
    call = json_value(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return (call["name"], arguments) if isinstance(json_value(arguments), dict) else None
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments or {}, ensure_ascii=False)


def json_value(text: str) -> Any:
    """The value of a JSON text; NoJson if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NO_JSON


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class NoJson:
    """What is no JSON text has as its value."""


NO_JSON = NoJson()
