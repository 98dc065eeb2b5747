"""Reads files through the page cache, a few bytes here and there or much at a time."""

import os
from io import FileIO
from pathlib import Path

from copyengine.wire.errors import ConfigError

WILLNEED: int = getattr(os, "POSIX_FADV_WILLNEED", 0)


class Files:
    """The file that is being read, kept open until another one is asked for."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._path: Path | None = None
        self._ahead = 0  # up to where the system has been told to read

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._path = None

    def read_into(self, path: Path, offset: int, target: memoryview, stop: int = 0) -> None:
        """Fill `target` from byte `offset` on. One read returns 2 GiB at most, so it may take several.

        `stop`, if it is given, is how far the next calls will read on: the system is told where it can be.
        """
        try:
            if self._file is None or path != self._path:
                self.__exit__()
                self._file, self._path, self._ahead = FileIO(path), path, 0
            if stop > self._ahead:
                self._read_ahead(self._file.fileno(), max(offset, self._ahead), stop)
            self._file.seek(offset)
            filled = 0
            while filled < len(target):
                got = self._file.readinto(target[filled:])
                if not got:
                    raise ConfigError(f"{path}: cut short at byte {offset + filled} since it was opened")
                filled += got
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None

    def _read_ahead(self, descriptor: int, start: int, stop: int) -> None:
        """By itself the system keeps less under way than a disk can do at a time: from a cold cache small tensors were
        read at half of the rate of plain reads (tests/bench/bench_loading.py)."""
        self._ahead = stop
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, start, stop - start, WILLNEED)
