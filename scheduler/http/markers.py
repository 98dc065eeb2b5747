"""What structures an answer's text."""

import re

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

LAYOUT_CHARS = 1024
"""Blanks that may stand between two markers; what follows more of them does not belong to what is before them."""

_LAYOUT = re.compile(rf"\s{{0,{LAYOUT_CHARS}}}")


def after_blanks(text: str, start: int = 0) -> int:
    """Where the blanks end that `text` has at `start`, or LAYOUT_CHARS of them."""
    found = _LAYOUT.match(text, start)
    assert found
    return found.end()


def unfinished(text: str, *markers: str) -> int:
    """Characters at the end of `text` that may be the beginning of one of `markers`, none of which is whole in it."""
    longest = min(len(text), max(map(len, markers)) - 1)
    for count in range(longest, 0, -1):
        end = text[-count:]
        if any(marker.startswith(end) for marker in markers):
            return count
    return 0


def begins(text: str, *markers: str) -> bool | None:
    """Whether `text` starts with one of `markers`; None if that depends on what follows."""
    if text.startswith(markers):
        return True
    return None if any(marker.startswith(text) for marker in markers) else False
