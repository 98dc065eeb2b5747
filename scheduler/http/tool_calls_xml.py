"""Calls written as `<function=NAME>`, `<parameter=P>` and values: the form of Qwen3-Coder and Qwen3.5."""

import json
from collections.abc import Mapping

from scheduler.http.markers import (
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    after_blanks,
    begins,
    unfinished,
)
from scheduler.http.tool_calls import ToolCallParser
from scheduler.http.tool_calls_json import NO_JSON, json_value
from scheduler.http.tool_schema import STRING, TEXT, Argument, admits

NAME_CHARS = 256
"""Of the longest name of a function or parameter."""

_LONGEST = max(map(len, (PARAMETER, FUNCTION_END, CALL_END)))
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class XmlToolCalls(ToolCallParser):
    """Values are text; the tool's schema says which of them are JSON.

    A value that may only be a string is sent while it arrives, others once they are complete. What the schema says
    nothing of is a string; so is what is no JSON text of a type that it allows. A newline behind a value's beginning
    and one before its end are layout. A value ends at the `</parameter>` that something of a call follows.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Argument]]) -> None:
        """`tools`: the arguments of each, by its name; see ToolSchema."""
        super().__init__()
        self._tools = tools
        self._function = ""
        self._parameters = 0
        self._key = ""
        self._argument = STRING
        self._value_begun = False
        self._searched = 0  # where in what is held the value's end may be

    def _call(self) -> bool:
        name = self._named(FUNCTION)
        if name is None:
            return self._ended and self._no_call()
        if not name:
            return self._no_call()
        self._begin(name)
        self._argue("{")
        self._function = name
        self._parameters = 0
        self._step = self._parameter
        return True

    def _parameter(self) -> bool:
        """Between parameters."""
        at = after_blanks(self._held)
        rest = self._held[at : at + _LONGEST]
        if begins(rest, FUNCTION_END, CALL_END):
            self._take(at + (len(FUNCTION_END) if rest.startswith(FUNCTION_END) else 0))
            self._argue("}")
            self._step = self._close
            return True
        name = self._named(PARAMETER)
        if name is None or begins(rest, FUNCTION_END, CALL_END) is None:
            return False
        if not name:
            self._argue("}")
            self._step = self._text
            return True
        self._key = f"{', ' if self._parameters else ''}{json.dumps(name, ensure_ascii=False)}: "
        self._parameters += 1
        self._argument = self._tools.get(self._function, {}).get(name, STRING)
        self._step = self._before_value
        return True

    def _named(self, marker: str) -> str | None:
        """The name behind `marker` and its end, both taken; "" if there is none; None if it is not known yet."""
        at = after_blanks(self._held)
        start = at + len(marker)
        found = begins(self._held[at:start], marker)
        if not found:
            return None if found is None else ""
        name, closed, _ = self._held[start : start + NAME_CHARS + 1].partition(">")
        if len(name) > NAME_CHARS or "\n" in name or (closed and not name):
            return ""
        if not closed:
            return None
        self._take(start + len(name) + len(closed))
        return name

    def _before_value(self) -> bool:
        if not self._held and not self._ended:
            return False
        self._held = self._held.removeprefix("\n")
        self._value_begun = False
        self._searched = 0
        self._step = self._value
        return True

    def _value(self) -> bool:
        end, after = self._value_end()
        if self._argument.types == TEXT:
            self._say_string(end)
            self._searched = max(0, self._searched - end)
            end = 0
        if after is None:
            if self._ended:  # in the middle of a value that is no string
                self._argue(self._key * bool(self._held) + self._take(len(self._held)))
            return False
        if self._argument.types == TEXT:
            self._argue('"')
        else:
            self._argue(self._key + _json(self._take(end), self._argument))
        self._take(after)
        self._step = self._parameter
        return True

    def _say_string(self, count: int) -> None:
        """The next characters of a string."""
        opening = "" if self._value_begun else self._key + '"'
        self._value_begun = True
        self._argue(opening + json.dumps(self._take(count), ensure_ascii=False)[1:-1])

    def _value_end(self) -> tuple[int, int | None]:
        """Where the value ends, as far as it is known; and how much lies between it and what follows, None if that is
        not known."""
        at = self._held.find(PARAMETER_END, self._searched)
        while at >= 0:
            end = at - 1 if self._held[max(0, at - 1) : at] == "\n" else at
            self._searched = at
            after = after_blanks(self._held, at + len(PARAMETER_END))
            found = begins(self._held[after : after + _LONGEST], PARAMETER, FUNCTION_END, CALL_END)
            if found or (found is None and self._ended):
                return end, after - end
            if found is None:
                return end, None
            at = self._held.find(PARAMETER_END, at + 1)
        if self._ended:
            return len(self._held), None
        self._searched = len(self._held) - unfinished(self._held, PARAMETER_END, "\n" + PARAMETER_END)
        return self._searched, None


def _json(text: str, argument: Argument) -> str:
    """A value as JSON text: as written if that is JSON of an allowed type and none of its words, else a string."""
    written = text.strip()
    written = _PYTHON.get(written, written)
    value = json_value(written)
    if text in argument.words:
        return json.dumps(text, ensure_ascii=False)
    if value is not NO_JSON and not isinstance(value, str) and admits(argument.types, value):
        return written
    if isinstance(value, str) and "string" not in argument.types:
        return written
    return json.dumps(text, ensure_ascii=False)
