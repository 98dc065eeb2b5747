"""Grammars in llguidance's dialect of Lark, written rule by rule. Pure.

What a tokenizer takes for one token whatever is around it matches no text in a grammar, only its number.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from scheduler.http.errors import invalid
from scheduler.json_grammar import json_of
from scheduler.validate import MAX_GRAMMAR_CHARS

ANY_TEXT = "(?s:.*)"


class Grammar:
    """Rules so far. Each method that makes one returns its name. ApiError once they are more than the engine takes:
    many parts may all refer to a large one."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens`: the added tokens that answers may hold, by their text."""
        self._tokens = tokens
        self._rules: list[str] = []
        self._count = 0  # characters of all rules

    def source(self, start: str) -> str:
        """The whole grammar, which begins with `start`: an expression over rules."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def rule(self, body: str, options: str = "") -> str:
        """A rule of its own."""
        return self._add("r", body, options)

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON text that the schema allows."""
        return self._add("r", json_of(schema))

    def marker(self, text: str) -> str:
        """An expression for `text`, which may be one token."""
        return f"<[{self._tokens[text]}]>" if text in self._tokens else literal(text)

    def up_to(self, marker: str) -> str:
        """Any text to the end of the first `marker` in it."""
        if marker not in self._tokens:
            return self._add("r", f"/{ANY_TEXT}{_pattern(marker)}/", "[lazy]")
        return self._add("r", f"{self.without(marker)} {self.marker(marker)}")

    def without(self, marker: str) -> str:
        """Any text in which `marker` does not occur."""
        text = self.text_without(marker)
        others = sorted(token for name, token in self._tokens.items() if name != marker)
        if not others:
            return text
        return self._add("r", f"{text} (<[{','.join(map(str, others))}]> {text})*")

    def text_without(self, marker: str, least: int = 0, most: int | None = None) -> str:
        """So many characters, of no added token, in which `marker` does not occur."""
        text = f"(?s:.{{{least},{'' if most is None else most}}})" if least or most is not None else ANY_TEXT
        return self._add("T", f"/{text}/ & ~/{ANY_TEXT}{_pattern(marker)}{ANY_TEXT}/")

    def _add(self, kind: str, body: str, options: str = "") -> str:
        name = f"{kind}{len(self._rules)}"
        self._count += len(body)
        if self._count > MAX_GRAMMAR_CHARS:
            text = f"tools and response_format make a grammar of more than {MAX_GRAMMAR_CHARS} characters: shorten them"
            raise invalid(text, code="invalid_grammar")
        self._rules.append(f"{name}{options}: {body}")
        return name


def literal(text: str) -> str:
    """An expression for exactly `text`."""
    return json.dumps(text, ensure_ascii=False)


def one_of(*expressions: str) -> str:
    """An expression for any of these."""
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def _pattern(text: str) -> str:
    """A regular expression for `text` between slashes."""
    return re.sub(r"[^\w<>]", lambda found: rf"\x{{{ord(found[0]):x}}}", text)
