"""Calls of tools, found in an answer's text while it arrives. Pure.

The Qwen families write a call in one of two ways, between `<tool_call>` and `</tool_call>`: as a JSON object
(tool_calls_json.py) or as XML (tool_calls_xml.py). Which one a model was taught stands in its chat template.
"""

from typing import Literal

from msgspec import Struct

from scheduler.http.markers import CALL, CALL_END, FUNCTION, after_blanks, begins, unfinished

CallForm = Literal["json", "xml"]


class Content(Struct, frozen=True):
    """Text outside of calls."""

    text: str


class CallBegan(Struct, frozen=True):
    """A call of the function `name`; `index` counts the answer's calls."""

    index: int
    name: str


class CallArguments(Struct, frozen=True):
    """The next piece of a call's arguments: the pieces of one concatenate to a JSON object."""

    index: int
    text: str


Event = Content | CallBegan | CallArguments


def call_form(template: str) -> CallForm | None:
    """How a model with this chat template writes calls; None if it is not known."""
    if CALL not in template:
        return None
    return "xml" if FUNCTION in template else "json"


class ToolCallParser:
    """Reads calls out of a text that arrives in pieces; however it is cut, what comes out is the same but for cuts.

    Nothing of the text is lost: what begins like a call but is none comes out as content. A call that goes wrong after
    its name is known keeps what it has, and its rest is content. One that the text's end cuts off keeps what it has.
    Blanks beside calls are layout and left out. Subclasses read what lies between the markers.
    """

    def __init__(self) -> None:
        self._held = ""  # not yet understood
        self._blanks: list[str] = []  # at the end of the content so far
        self._events: list[Event] = []
        self._calls = 0
        self._step = self._text
        self._ended = False
        self._follows_call = False

    def push(self, text: str) -> list[Event]:
        """What became certain with `text`."""
        self._held += text
        while self._step():
            pass
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """The rest, after the last piece."""
        self._ended = True
        events = self.push("")
        if self._blanks and not self._follows_call:
            events.append(Content("".join(self._blanks)))
        self._blanks = []
        return events

    # Each step looks at what is held and returns whether it got further. It may decide nothing that could be decided
    # otherwise once more is there, unless the text has ended.

    def _text(self) -> bool:
        at = self._held.find(CALL)
        if at >= 0:
            self._say(self._take(at))
            self._take(len(CALL))
            self._step = self._call
            return True
        self._say(self._take(len(self._held) - (0 if self._ended else unfinished(self._held, CALL))))
        return False

    def _call(self) -> bool:
        """Behind `<tool_call>`."""
        raise NotImplementedError

    def _close(self) -> bool:
        """Behind what a call consists of: its end, which may be missing."""
        at = after_blanks(self._held)
        match begins(self._held[at : at + len(CALL_END)], CALL_END):
            case None:
                if self._ended:
                    self._held = ""
                return False
            case True:
                self._take(at + len(CALL_END))
        self._step = self._text
        return True

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _say(self, text: str) -> None:
        """Content, whose last blanks wait for what follows."""
        said = text.rstrip()
        if said:
            self._events.append(Content("".join(self._blanks) + said))
            self._blanks = []
            self._follows_call = False
        if len(said) < len(text):
            self._blanks.append(text[len(said) :])

    def _no_call(self) -> bool:
        """What looked like the beginning of a call is content, and what is held is looked at anew."""
        self._say(CALL)
        self._step = self._text
        return True

    def _begin(self, name: str) -> None:
        self._events.append(CallBegan(self._calls, name))
        self._calls += 1
        self._blanks = []
        self._follows_call = True

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._calls - 1, text))
