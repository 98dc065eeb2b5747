"""Reads files through the page cache, a few bytes here and there or much at a time."""

from io import FileIO
from pathlib import Path

from copyengine.wire.errors import ConfigError


class Files:
    """The file that is being read, kept open until another one is asked for."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._path: Path | None = None

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._path = None

    def read_into(self, path: Path, offset: int, target: memoryview, stop: int = 0) -> None:
        """Fill `target` from byte `offset` on; the system reads ahead by itself, whatever `stop` says.

        One read returns 2 GiB at most, so it may take several.
        """
        try:
            if self._file is None or path != self._path:
                self.__exit__()
                self._file, self._path = FileIO(path), path
            self._file.seek(offset)
            filled = 0
            while filled < len(target):
                got = self._file.readinto(target[filled:])
                if not got:
                    raise ConfigError(f"{path}: cut short at byte {offset + filled} since it was opened")
                filled += got
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
