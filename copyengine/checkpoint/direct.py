"""Reads files past the page cache, where the system lets us: in whole blocks into a buffer, and from there on.

What is read so leaves nothing in the page cache, and nothing has to be given up there for it. Files that stay in the
cache are read from there at the next start, at the rate of memory, so this is for those that could not stay
(tests/bench/bench_loading.py measures both).
"""

import errno
import mmap
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from copyengine import available
from copyengine.checkpoint.files import OneOpen
from copyengine.wire.errors import ConfigError

BLOCK_NBYTES = 4096
"""Offsets, lengths and addresses of direct reads are multiples of the disk's block, which is 512 or 4,096 bytes."""

BUFFER_NBYTES = 4 << 20
"""What is read at a time."""

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""0 where there is no such thing, as on Windows and macOS."""


def is_better_direct(nbytes: int) -> bool:
    """Whether files of `nbytes` are better read so: the memory that can be had now, in a container too,
    could not hold them."""
    return bool(O_DIRECT) and nbytes > available.host_nbytes()


class DirectFiles(OneOpen):
    """As files.Files, for one thread that reads on and on; where a file allows no direct reads it is read as any."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, BUFFER_NBYTES), np.uint8)
        self._flags = 0
        self._start = self._end = 0  # the bytes of the file that are in the buffer

    def read_into(self, path: Path, offset: int, target: memoryview, stop: int = 0) -> None:
        """Fill `target` from byte `offset` on. Nothing behind byte `stop` is of use, if that is given: what lies before
        it may be read ahead."""
        if not len(target):
            return
        into: NDArray[np.uint8] = np.frombuffer(target, np.uint8)
        try:
            if path != self._path:
                self._open(path, O_DIRECT)
            at, end = offset, offset + into.size
            while at < end:
                if not self._start <= at < self._end:
                    self._fill(at, max(stop, end))
                length = min(self._end, end) - at
                np.copyto(into[at - offset : at - offset + length], self._buffer[at - self._start :][:length])
                at += length
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None

    def read_all(self, path: Path, offset: int, targets: Sequence[memoryview], stop: int = 0) -> None:
        """Fill one of `targets` after the other from byte `offset` on."""
        end = max(stop, offset + sum(map(len, targets)))
        for target in targets:
            self.read_into(path, offset, target, end)
            offset += len(target)

    def _open(self, path: Path, flags: int) -> None:
        self._close()
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | flags)
        except OSError as error:
            if not flags or error.errno != errno.EINVAL:
                raise
            return self._open(path, 0)
        self._file, self._path, self._flags = FileIO(descriptor), path, flags
        self._start = self._end = 0

    def _fill(self, at: int, stop: int) -> None:
        """Read the blocks from that of byte `at` on, up to `stop` or as many as the buffer holds."""
        assert self._file is not None and self._path is not None
        start = at // BLOCK_NBYTES * BLOCK_NBYTES
        length = min(BUFFER_NBYTES, -(-(stop - start) // BLOCK_NBYTES) * BLOCK_NBYTES)
        self._file.seek(start)
        try:
            got = self._file.readinto(self._buffer[:length].data) or 0
        except OSError as error:
            if not self._flags or error.errno != errno.EINVAL:
                raise
            self._open(self._path, 0)
            return self._fill(at, stop)
        self._start, self._end = start, start + got
        if self._end <= at:
            raise ConfigError(f"{self._path}: cut short at byte {at} since it was opened")
