"""A model's text files, tried in a process of its own before anything is started: `python -m scheduler.text_trial DIR`.

Tokenizer and chat template are read and run by libraries that a file of a few kilobytes can bring to their end: it has
them take all memory there is, never return, or fall over. What does so here costs a process that nobody needs.
"""

import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from copyengine.checkpoint.directory import read_config
from copyengine.wire.errors import ConfigError, RequestRefused
from copyengine.wire.lifecycle import EXIT_CONFIG, Order, watch_parent
from scheduler.chat_template import ChatTemplate
from scheduler.panics import Panic
from scheduler.tokenize import FILES, TextCodec, load_text_codec

TRIAL_S = 60.0
"""Seconds that the trial may take, as long as a text may take to become tokens. The parent ends it then; it ends itself
too, where there is no parent any more."""

TRIAL_NBYTES = 2 * 2**30
"""Memory that it may take, which the parent alone looks at: far more than any real tokenizer does."""

LOOK_S = 0.02
"""Between two looks at how much memory it takes."""

MAX_REASON_NBYTES = 2000
"""Of what the trial says is wrong with a file, for one line at the start. A pipe takes it before anybody reads."""

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


class TextTrial:
    """The trial of a model's text files, which runs beside whatever else is looked at inside `with`."""

    def __init__(self, directory: Path | None, hf_overrides: str) -> None:
        """Begins it; there is none without a directory, or without such files in it."""
        paths = [directory / name for name in FILES] if directory else []
        self._found = [path for path in paths if os.path.exists(path)]
        self._end_s = time.monotonic() + TRIAL_S
        self._process: subprocess.Popen[bytes] | None = None
        if directory and self._found:
            argv = [sys.executable, "-m", "scheduler.text_trial", str(directory), hf_overrides]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=null)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()

    def passed(self) -> None:
        """Wait for its end. ConfigError if the files are no good, or take too much."""
        if self._process is None:
            return
        code = self._watched(self._process)
        assert self._process.stdout is not None
        said = self._process.stdout.read(MAX_REASON_NBYTES).decode(errors="replace").strip()
        if code == EXIT_CONFIG and said:
            raise ConfigError(said)
        if code:
            raise self._damaged(f"end the process that tries them (exit code {code})")

    def _watched(self, process: "subprocess.Popen[bytes]") -> int:
        while True:
            try:
                return process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > self._end_s:
                    raise self._damaged(f"take more than {TRIAL_S:g} s to be read and tried") from None
                if _rss_nbytes(process.pid) > TRIAL_NBYTES:
                    raise self._damaged(
                        f"take more than {TRIAL_NBYTES:,} bytes of memory to be read and tried"
                    ) from None

    def _damaged(self, what: str) -> ConfigError:
        names = ", ".join(path.name for path in self._found)
        return ConfigError(
            f"{self._found[0].parent}: its text files ({names}) {what}: they are damaged or made to do harm; "
            "download them again"
        )


def _rss_nbytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


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


def _try_grammars(codec: TextCodec, vocab_size: int, directory: Path) -> None:
    try:
        codec.grammars(vocab_size)
    except ValueError as error:
        if isinstance(error.__cause__, Panic):  # otherwise it knows no such tokenizer: the start says so
            raise ConfigError(f"{directory / 'tokenizer.json'}: llguidance fails over it: {error}") from None


def _end(order: Order) -> None:
    if order == "stop":
        os._exit(1)


def main(argv: Sequence[str]) -> int:
    """The trial; the exit code. What is wrong is said on standard output. Standard input's end ends it."""
    watch_parent(_end)
    # not a thread of Python's, which could not run while a library holds the interpreter's lock
    faulthandler.dump_traceback_later(TRIAL_S, exit=True)
    directory = Path(argv[0])
    try:
        config = read_config(directory, argv[1])
        codec = load_text_codec(directory, config)
        try_texts(codec, directory)
        vocab_size = config.get("vocab_size")
        _try_grammars(codec, vocab_size if isinstance(vocab_size, int) else len(codec.tokens()), directory)
    except ConfigError as error:
        sys.stdout.buffer.write(str(error).encode(errors="replace")[:MAX_REASON_NBYTES])
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
