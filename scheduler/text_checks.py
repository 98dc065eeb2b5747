"""What a model's text files must stand: each thing that requests will have done with them, once, over short texts."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from copyengine.wire.errors import ConfigError, RequestRefused
from scheduler.chat_template import ChatTemplate
from scheduler.panics import Panic
from scheduler.tokenize import TextCodec

PLAIN = ("Hello, world! 12345 (x) = y_z;\n\tnaïve café 日本語 🦊 " * 20, " a\u0301 b  c", "")
"""Texts that every tokenizer must take, but for what it has no token for."""

HARD = ("a" * 5000 + "!", " " * 5000 + "!", "1" * 5000, "\n \t" * 2000, "aB1 " * 2000, "\u0301" * 2000, "é" * 5000)
"""Those over which regular expressions go back again and again; what is refused of them is a request's matter."""

MAX_GROWTH = 64
"""Characters that the tokenizer's normaliser may make of one, on a text's average; Unicode's own makes 18 of one at
most."""

_TURNS = [{"role": role, "content": "x y"} for role in ("user", "assistant")] * 20
CHATS = (_TURNS[:1], [{"role": "system", "content": "s"}, *_TURNS, _TURNS[0]])
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def try_texts(codec: TextCodec, directory: Path) -> None:
    """Do once what requests will have done. ConfigError if a library fails in its own code over it."""
    if codec.has_text:
        path = directory / "tokenizer.json"
        _try_growth(codec, path)
        for text in (*PLAIN, *HARD):
            _try_encoding(codec, text, path)
        _try_decoding(codec, path)
    if codec.chat_template is not None:
        for chat in CHATS:
            for tools in (None, TOOLS):
                _try_chat(codec, codec.chat_template, chat, tools)


def try_grammars(codec: TextCodec, vocab_size: int, directory: Path) -> None:
    """Have llguidance read the tokenizer. ConfigError if it fails in its own code over it."""
    try:
        codec.grammars(vocab_size)
    except ValueError as error:
        if isinstance(error.__cause__, Panic):  # otherwise it knows no such tokenizer: the start says so
            raise ConfigError(f"{directory / 'tokenizer.json'}: llguidance fails over it: {error}") from None


def _try_chat(codec: TextCodec, template: ChatTemplate, chat: Sequence[Any], tools: Sequence[Any] | None) -> None:
    """A template may object to what it is given, but not take all that a rendering may take over so little."""
    try:
        text = template.render(chat, tools)
        if codec.has_text:
            codec.encode_rendered(text)
    except RequestRefused as refused:
        if isinstance(refused.__cause__, TimeoutError | OverflowError):
            raise ConfigError(
                f"{template.origin}: the chat template takes too much over a chat of {len(chat)} short messages: "
                f"{refused.__cause__}"
            ) from None


def _try_growth(codec: TextCodec, path: Path) -> None:
    """Also of what the normaliser itself puts in the place of something, of which another part of it may make more."""
    parts = json.loads(path.read_bytes())
    for pattern, content in _replacements(parts.get("decoder")):
        _check_growth(len(pattern), len(content), "decoder", path)
    put_in = [(len(pattern), content) for pattern, content in _replacements(parts.get("normalizer"))]
    for before, text in (*((len(text), text) for text in PLAIN), *put_in):
        _check_growth(before, len(text), "normalizer", path)
        try:
            _check_growth(before, len(codec.normalised(text)), "normalizer", path)
        except Panic as error:
            raise ConfigError(f"{path}: the tokenizers library fails over its normalizer: {error}") from None


def _check_growth(before: int, after: int, kind: str, path: Path) -> None:
    if after > MAX_GROWTH * max(1, before):
        raise ConfigError(
            f"{path}: its {kind} makes {after:,} characters of {before:,}: it is damaged or made to do harm; "
            "download it again"
        )


def _replacements(part: object) -> Iterator[tuple[str, str]]:
    """What is put in the place of what, of a regular expression in that of nothing."""
    match part:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            yield pattern, content
        case {"type": "Replace", "content": str(content)}:
            yield "", content
        case {"normalizers": list(several)} | {"decoders": list(several)}:
            for one in several:
                yield from _replacements(one)


def _try_encoding(codec: TextCodec, text: str, path: Path) -> None:
    try:
        codec.encode_prompt(text)
    except RequestRefused as refused:
        if isinstance(refused.__cause__, Panic) and text in PLAIN:
            raise ConfigError(f"{path}: the tokenizers library fails over it: {refused.__cause__}") from None


def _try_decoding(codec: TextCodec, path: Path) -> None:
    detokenizer = codec.detokenizer()
    for token in codec.tokens():
        detokenizer.alone(token)
        if detokenizer.fault:
            raise ConfigError(f"{path}: token {token} cannot be decoded: {detokenizer.fault}")
