"""Where an answer ends: stop strings in its text, and its tokens. Pure."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The first match is the one that is complete first; of several complete at the same character, the longest. Only
    the end of the text that may still become a match is held back. However the text is cut into pieces, what comes
    out is the same.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched = False
        self._patterns = [(stop, _failure(stop)) for stop in stops]
        self._states = [0] * len(stops)  # characters of stops[i] that the text now ends with
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is now known to be no part of a stop string; nothing more once `matched`."""
        if self.matched:
            return ""
        if not self._patterns:
            return text
        for read, character in enumerate(text, start=1):
            longest = self._advance(character)
            if longest:
                self.matched = True
                seen = self._held + text[:read]
                return seen[: len(seen) - longest]
        seen = self._held + text
        held = max(self._states)
        self._held = seen[len(seen) - held :]
        return seen[: len(seen) - held]

    def flush(self) -> str:
        """What was held back, when the text ended without a match."""
        held, self._held = self._held, ""
        return "" if self.matched else held

    def _advance(self, character: str) -> int:
        """Read one character; the length of the longest stop string that it completes, or 0."""
        longest = 0
        for i, (stop, failure) in enumerate(self._patterns):
            state = self._states[i]
            while state and stop[state] != character:
                state = failure[state]
            state += stop[state] == character
            self._states[i] = state
            if state == len(stop):
                longest = max(longest, state)
        return longest


def _failure(stop: str) -> list[int]:
    """`failure[n]`: length of the longest proper prefix of stop[:n] that is also its suffix (Knuth-Morris-Pratt)."""
    failure = [0] * (len(stop) + 1)
    k = 0
    for n in range(1, len(stop)):
        while k and stop[k] != stop[n]:
            k = failure[k]
        k += stop[k] == stop[n]
        failure[n + 1] = k
    return failure
