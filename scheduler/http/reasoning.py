"""An answer's text split into what the model thought and what it says. Pure."""

from typing import NamedTuple

from scheduler.http.markers import CALL, THINK, THINK_END, after_blanks, begins, unfinished


class Split(NamedTuple):
    """The next pieces of both, in this order."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Splits a text that arrives in pieces at `<think>` and `</think>`; however it is cut, what comes out is the same.

    An answer thinks if it begins with `<think>`, blanks aside, or if it is `opened`: the prompt ends with `<think>`. It
    thinks up to `</think>`, or to its end, and never again. Blanks beside the markers stay where they are, as in vLLM,
    but those before `<think>`. If `function` is given, `<tool_call>`, blanks and `function` also end the thinking:
    models forget its end before a call.
    """

    def __init__(self, opened: bool, function: str = "") -> None:
        self.thinking = opened
        self._function = function
        self._held = ""
        self._begun = False

    def push(self, text: str) -> Split:
        """What became certain with `text`."""
        self._held += text
        if not self._begun and not self._begin():
            return Split()
        return self._think() if self.thinking else Split(content=self._take(len(self._held)))

    def flush(self) -> Split:
        """The rest, after the last piece."""
        rest = self._take(len(self._held))
        return Split(reasoning=rest) if self.thinking else Split(content=rest)

    def _begin(self) -> bool:
        """Whether it is known if `<think>` comes first."""
        blanks = after_blanks(self._held)
        match begins(self._held[blanks : blanks + len(THINK)], THINK):
            case None:
                return False
            case True:
                self._take(blanks + len(THINK))
                self.thinking = True
        self._begun = True
        return True

    def _think(self) -> Split:
        end, known = self._end()
        if end < 0:
            return Split(reasoning=self._take(known))
        thought = self._take(end)
        self.thinking = False
        if self._held.startswith(THINK_END):
            self._take(len(THINK_END))
        return Split(thought, self._take(len(self._held)))

    def _end(self) -> tuple[int, int]:
        """Where the thinking ends, or -1; and up to where it is known not to."""
        end = self._held.find(THINK_END)
        call = self._held.find(CALL) if self._function else -1
        while call >= 0 and (end < 0 or call < end):
            after = after_blanks(self._held, call + len(CALL))
            match begins(self._held[after : after + len(self._function)], self._function):
                case True:
                    return call, call
                case None:
                    return -1, call
            call = self._held.find(CALL, call + len(CALL))
        markers = (THINK_END, CALL) if self._function else (THINK_END,)
        return end, len(self._held) - unfinished(self._held, *markers)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken
