"""Reads files through the page cache, a few bytes here and there or much at a time."""

import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Self

from copyengine.wire.errors import ConfigError

WILLNEED: int = getattr(os, "POSIX_FADV_WILLNEED", 0)

PLACES = 1024
"""That one call fills at most: what Linux and macOS allow."""


class OneOpen:
    """The file that is being read, kept open until another one is asked for."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._path: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._path = None


class Files(OneOpen):
    """Reads what is asked for, in as few calls as can be."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead = 0  # up to where the system has been told to read

    def read_into(self, path: Path, offset: int, target: memoryview, stop: int = 0) -> None:
        """Fill `target` from byte `offset` on; otherwise as `read_all`."""
        self.read_all(path, offset, [target], stop)

    def read_all(self, path: Path, offset: int, targets: Sequence[memoryview], stop: int = 0) -> None:
        """Fill one of `targets` after the other from byte `offset` on.

        `stop`, if it is given, is how far the next calls will read on: the system is told where it can be.
        ConfigError if the file is too short or cannot be read.
        """
        try:
            if self._file is None or path != self._path:
                self._close()
                self._file, self._path, self._ahead = FileIO(path), path, 0
            if stop > self._ahead:
                self._read_ahead(self._file.fileno(), max(offset, self._ahead), stop)
            left = [target for target in targets if len(target)]
            while left:
                got = self._read(self._file, offset, left)
                if not got:
                    raise ConfigError(f"{path}: cut short at byte {offset} since it was opened")
                offset += got
                left = _rest(left, got)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None

    @staticmethod
    def _read(file: FileIO, offset: int, targets: Sequence[memoryview]) -> int:
        """Bytes of the file that are in `targets` then: 2 GiB at most, and only the first one's where the system reads
        into one place at a time."""
        if hasattr(os, "preadv"):
            got: int = os.preadv(file.fileno(), targets[:PLACES], offset)
            return got
        file.seek(offset)
        return file.readinto(targets[0]) or 0

    def _read_ahead(self, descriptor: int, start: int, stop: int) -> None:
        """By itself the system keeps less under way than a disk can do at a time: from a cold cache small tensors were
        read at half of the rate of plain reads (tests/bench/bench_loading.py)."""
        self._ahead = stop
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, start, stop - start, WILLNEED)


def _rest(targets: Sequence[memoryview], filled: int) -> list[memoryview]:
    """What is left of `targets` once their first `filled` bytes are filled."""
    for i, target in enumerate(targets):
        if filled < len(target):
            return [target[filled:], *targets[i + 1 :]]
        filled -= len(target)
    return []
