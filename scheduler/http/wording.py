"""What the engine says of a request in the words of who sent it over HTTP: fields have other names there."""

import re
from collections.abc import Mapping
from typing import Any

from scheduler.protocol import Sampling

_LISTING = re.compile(r"\n *\d+ \| ")
"""Where llguidance begins to list the grammar, which we wrote and nobody sent."""

_PLACE = re.compile(r"at \d+\(\d+\): ")
"""A line and column of it."""


class Wording:
    """For one request. Without `body` fields keep the engine's names; `max_model_len` is 0 if it is not known."""

    def __init__(self, body: Any = None, max_model_len: int = 0) -> None:
        """`body` is the request's Struct."""
        self._fields = frozenset(getattr(body, "__struct_fields__", Sampling.__struct_fields__))
        self._names = _names(body) if body is not None else {"token_ids": "prompt"}
        self._max_model_len = max_model_len

    def field(self, name: str) -> str | None:
        """What the request calls the engine's `name`; None if it has no such field."""
        name = self._names.get(name, name)
        return name if name in self._fields or name == "prompt" else None

    def told(self, detail: str) -> tuple[str, str | None]:
        """`detail`, which begins with the field that it is about if it is about one, and that field."""
        name = re.match(r"\w*", detail)
        field = self.field(name[0]) if name else None
        return (detail if field is None or name is None else field + detail[name.end() :]), field

    def grammar(self, detail: str) -> tuple[str, str | None]:
        """The same of the grammar, of which the client sent something else that we made it from."""
        field = self.field("grammar")
        reason = _PLACE.sub("", _LISTING.split(detail)[0], count=1)
        return (reason if field is None else f"{field}: {reason}"), field

    def too_long(self, detail: str) -> tuple[str, str | None]:
        """The same of a prompt that does not fit, in words that clients look for so as to shorten it by themselves."""
        length = f" is {self._max_model_len} tokens" if self._max_model_len else " is exceeded"
        return f"This model's maximum context length{length}. Here: {detail}", self.field("token_ids")


def _names(body: Any) -> Mapping[str, str]:
    """The engine's names and what `body` calls these."""
    if not hasattr(body, "response_format"):
        return {"token_ids": "prompt"}
    bound = body.response_format is not None and body.response_format.type != "text"
    newer = body.max_completion_tokens is not None
    return {
        "token_ids": "messages",
        "prompt": "messages",
        "logprobs": "top_logprobs",
        "max_tokens": "max_completion_tokens" if newer else "max_tokens",
        "grammar": "response_format" if bound else "tools",
    }
