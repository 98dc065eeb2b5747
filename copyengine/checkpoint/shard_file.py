"""Writes one safetensors file whose tensors are known before their bytes are: these may come in any order."""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from msgspec import Struct

from copyengine.checkpoint.header import ITEMSIZE


class Output(Struct, frozen=True):
    """One tensor to be written."""

    name: str
    dtype: str  # as the format spells it
    shape: tuple[int, ...]
    nbytes: int


def file_nbytes(outputs: Sequence[Output]) -> int:
    """Bytes of the file that holds `outputs`."""
    return len(_header(outputs)[0]) + sum(output.nbytes for output in outputs)


def part_of(path: Path) -> Path:
    """Where the file `path` is while it is being written."""
    return path.with_name(f".{path.name}.part")


class ShardFile:
    """`path`, which is there only once all of it is: it is written beside and renamed. Used by several threads."""

    def __init__(self, path: Path, outputs: Sequence[Output]) -> None:
        self._path = path
        self._part = part_of(path)
        self._header, self._offsets = _header(outputs)
        self._lock = threading.Lock()

    def __enter__(self) -> "ShardFile":
        self._file = open(self._part, "wb")
        self._file.write(self._header)
        return self

    def write(self, name: str, data: bytes | memoryview, start: int = 0) -> None:
        """`data` are bytes of the tensor `name` from byte `start` on. OSError if the disk is full."""
        with self._lock:
            self._file.seek(self._offsets[name] + start)
            self._file.write(data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Renames the file if no error came; removes what there is of it otherwise."""
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())  # a name must not outlive a power cut that its bytes did not
            if error is None:
                os.replace(self._part, self._path)
        finally:
            self._part.unlink(missing_ok=True)


def _header(outputs: Sequence[Output]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the tensors, and where in the file each tensor begins: wide elements first, so that all are
    aligned to their element."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for output in sorted(outputs, key=lambda output: -ITEMSIZE.get(output.dtype, 1)):
        starts[output.name] = end
        end += output.nbytes
        offsets = [starts[output.name], end]
        entries[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}
