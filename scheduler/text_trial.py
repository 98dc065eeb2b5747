"""A model's text files, tried in a process of its own before anything is started: `python -m scheduler.text_trial DIR`.

Tokenizer and chat template are read and run by libraries that a file of a few kilobytes can bring to their end: it has
them take all memory there is, never return, or fall over. What does so here costs a process that nobody needs.
"""

import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

from copyengine.checkpoint.directory import read_config
from copyengine.wire.errors import ConfigError
from copyengine.wire.lifecycle import EXIT_CONFIG, Order, watch_parent
from scheduler.text_checks import try_grammars, try_texts
from scheduler.tokenize import FILES, load_text_codec

TRIAL_S = 60.0
"""Seconds that the trial may take, as long as a text may take to become tokens. The parent ends it then; it ends itself
too, where there is no parent any more."""

TRIAL_NBYTES = 2 * 2**30
"""Memory that it may take, which the parent alone looks at: far more than any real tokenizer does."""

LOOK_S = 0.02
"""Between two looks at how much memory it takes."""

MAX_REASON_NBYTES = 2000
"""Of what the trial says is wrong with a file, for one line at the start. A pipe takes it before anybody reads."""


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
        try_grammars(codec, vocab_size if isinstance(vocab_size, int) else len(codec.tokens()), directory)
    except ConfigError as error:
        sys.stdout.buffer.write(str(error).encode(errors="replace")[:MAX_REASON_NBYTES])
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
