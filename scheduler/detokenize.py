"""Tokens to text, one token at a time."""

import re

from tokenizers import Tokenizer

from scheduler.panics import is_panic, reason

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"

LONG = 16
"""Tokens without a whole place from which on the window is cut in the middle, if that changes nothing."""

CHARACTER_TOKENS = 4
"""As many as a character can have: it is of four bytes at most."""


class Detokenizer:
    """The text of a growing list of tokens, special tokens left out.

    What `push` and `flush` return concatenates to the decoding of all tokens at once. Each push decodes a window from
    the last two places where the text was whole: the token before decides, for instance, whether a leading space is
    kept, and earlier ones cannot matter. `fault` says why the tokenizer cannot decode them, if that happened: there is
    no text from then on.
    """

    fault = ""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text came out before the window's last whole place
        self._sent = 0  # characters of the window's text that came out

    def push(self, token: int) -> str:
        """The text that became certain with `token`."""
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self._hidden:
            return ""
        self._window.append(token)
        if _BYTE_TOKEN.fullmatch(name):  # what a run of byte tokens means is certain only at its end
            return ""
        text = self._decode(self._window)
        whole = not text.endswith(_UNFINISHED)
        out = text[self._sent : len(text) if whole else len(text) - 1]
        self._sent += len(out)
        if whole:
            self._window = self._window[self._known :]
            self._known = len(self._window)
            self._sent = len(self._decode(self._window))
        elif len(self._window) - self._known >= LONG:
            self._cut(text)
        return out

    def _cut(self, text: str) -> None:
        """Leave out of the window what can matter no more: bytes that are no character may go on to the answer's end.

        `text` is the window's; all of it but its unfinished end has come out. Only that can change, and it lies within
        the last tokens: the window goes on from there if they read the same by themselves.
        """
        head, tail = self._window[:-CHARACTER_TOKENS], self._window[-CHARACTER_TOKENS:]
        rest = self._decode(tail)
        if self._decode(head) + rest == text and self._sent == len(text) - 1:
            self._window, self._known, self._sent = tail, 0, len(rest) - 1

    def flush(self) -> str:
        """The rest, after the last token: an unfinished character shows as U+FFFD."""
        out = self._decode(self._window)[self._sent :]
        self._sent += len(out)
        return out

    def alone(self, token: int) -> str:
        """The text of `token` by itself, of a special one too."""
        return self._decode([token])

    def _decode(self, tokens: list[int]) -> str:
        try:
            return self._tokenizer.decode(tokens, skip_special_tokens=False)
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            self.fault = reason(error)
            return ""


class NoText:
    """Stands in where the model has no tokenizer: tokens have no text."""

    fault = ""

    def push(self, token: int) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""

    def alone(self, token: int) -> str:
        """No text."""
        return ""
