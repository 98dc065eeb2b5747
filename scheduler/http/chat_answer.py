"""One answer of a chat: its text becomes thinking, content and calls of tools. Pure, but that calls get random ids."""

import secrets

from msgspec import UNSET

from scheduler.http.chat_replies import Delta, FinishReason, ReplyCall, ReplyFunction, ReplyMessage
from scheduler.http.reasoning import ReasoningSplitter, Split
from scheduler.http.tool_calls import CallArguments, CallBegan, Content, Event, ToolCallParser
from scheduler.protocol import Reason

NOTHING = Delta()


class ChatAnswer:
    """Reads an answer while it arrives; `message` is what a client that adds up the deltas has."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: ToolCallParser | None) -> None:
        """Without `splitter` nothing is thinking, without `parser` nothing is a call."""
        self._splitter = splitter
        self._parser = parser
        self._reasoning = ""
        self._content = ""
        self._calls: list[tuple[str, str, str]] = []  # id, name, arguments

    def push(self, text: str) -> Delta:
        """What follows with `text`; NOTHING if that is not known yet."""
        split = Split(content=text) if self._splitter is None else self._splitter.push(text)
        if self._parser is None:
            return self._delta(split.reasoning, [Content(split.content)])
        return self._delta(split.reasoning, self._parser.push(split.content))

    def flush(self) -> Delta:
        """The rest, after the last piece."""
        split = Split() if self._splitter is None else self._splitter.flush()
        if self._parser is None:
            return self._delta(split.reasoning, [Content(split.content)])
        return self._delta(split.reasoning, self._parser.push(split.content) + self._parser.flush())

    def finish_reason(self, reason: Reason) -> FinishReason:
        """As OpenAI calls it; "tool_calls" if it ended by itself and there are some."""
        return "length" if reason == "length" else "tool_calls" if self._calls else "stop"

    def message(self) -> ReplyMessage:
        """All of it."""
        calls = [
            ReplyCall(ReplyFunction(arguments, name), id=id, type="function") for id, name, arguments in self._calls
        ]
        nothing = None if calls or self._reasoning else ""
        return ReplyMessage(self._content or nothing, self._reasoning or UNSET, calls or UNSET)

    def _delta(self, reasoning: str, events: list[Event]) -> Delta:
        content = "".join(event.text for event in events if isinstance(event, Content))
        calls = [self._call(event) for event in events if not isinstance(event, Content)]
        self._reasoning += reasoning
        self._content += content
        if not (reasoning or content or calls):
            return NOTHING
        return Delta(UNSET, content or UNSET, reasoning or UNSET, calls or UNSET)

    def _call(self, event: CallBegan | CallArguments) -> ReplyCall:
        if isinstance(event, CallBegan):
            call_id = f"call_{secrets.token_hex(12)}"
            self._calls.append((call_id, event.name, ""))
            return ReplyCall(ReplyFunction("", event.name), event.index, call_id, "function")
        call_id, name, arguments = self._calls[event.index]
        self._calls[event.index] = (call_id, name, arguments + event.text)
        return ReplyCall(ReplyFunction(event.text), event.index)
