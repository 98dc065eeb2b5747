"""Names of modules as quantization_configs state them, to be or not to be quantised: plain, with wildcards, or regular.

The same module has other names in other files of the same model, which differ in what stands before `layers.`; so a
name is matched as each of them.
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from msgspec import Struct

from copyengine.checkpoint.keys import show
from copyengine.checkpoint.spellings import respelt

PATTERNS_KEPT = 1024
"""Compiled patterns that are kept: those of one checkpoint's configuration are some hundred at most."""

REGULAR = "re:"
"""What compressed-tensors puts before a regular expression."""


class Patterns(Struct, frozen=True):
    """A list of them; two are equal if they have the same patterns, in whatever order.

    A plain one names a module and all in it, by its whole name or by the end of it; one with `*` or `?` likewise; one
    behind "re:" is a regular expression that the name begins with.
    """

    words: frozenset[str]
    wild: tuple[str, ...]
    regular: tuple[str, ...]

    def match(self, name: str) -> bool:
        """Whether one of them is `name`, or something that it is in."""
        return any(self._match(spelling) for spelling in respelt(name))

    def _match(self, name: str) -> bool:
        if any(run in self.words for run in _runs(name)):
            return True
        if any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in self.wild):
            return True
        return any(_compiled(pattern).match(name) for pattern in self.regular)


def patterns(stated: Sequence[str]) -> Patterns:
    """Of the strings of a list. ValueError for what is no regular expression."""
    regular = tuple(sorted({text.removeprefix(REGULAR) for text in stated if text.startswith(REGULAR)}))
    for text in regular:
        try:
            _compiled(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{show(REGULAR + text)} is no regular expression ({error})") from None
    others = [text for text in stated if not text.startswith(REGULAR)]
    wild = tuple(sorted({text for text in others if "*" in text or "?" in text}))
    return Patterns(frozenset(others) - set(wild), wild, regular)


@lru_cache(maxsize=PATTERNS_KEPT)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _runs(name: str) -> Iterator[str]:
    """Every run of neighbouring words of a dotted name."""
    words = name.split(".")
    for first in range(len(words)):
        for last in range(first, len(words)):
            yield ".".join(words[first : last + 1])
