"""The header of one safetensors file: 8 bytes of little-endian length, then that much JSON, then the tensors' bytes."""

import math
import os
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec import Struct

from copyengine.checkpoint.keys import show
from copyengine.wire.errors import ConfigError

MAX_HEADER_NBYTES = 100_000_000
"""The format's own limit."""

MAX_DIMENSIONS = 16
"""Of a tensor; checkpoints have four at most. A longer shape is taken for damaged, before it is multiplied out."""

MAX_EXTENT = 2**63 - 1
"""Of one dimension, and what 64-bit sizes can say; beyond it a shape is taken for damaged."""

ITEMSIZE = MappingProxyType(
    {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
    | {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1}
)
"""Bytes per element of the format's element types. Of others (sub-byte ones) only the place in the file is checked."""


class TensorRef(Struct, frozen=True):
    """Where a tensor's bytes lie."""

    path: Path
    offset: int  # bytes from the start of the file
    nbytes: int
    dtype: str  # as the format spells it: "BF16"
    shape: tuple[int, ...]


class _Entry(Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, TensorRef]:
    """Every tensor of the file at `path`. ConfigError, naming the file, if it is absent, cut short or malformed."""
    try:
        with open(path, "rb") as file:
            file_nbytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_nbytes < 8 or length > min(file_nbytes - 8, MAX_HEADER_NBYTES):
                raise ConfigError(
                    f"{path}: its header claims {length} bytes, the file has {file_nbytes}: "
                    "it is cut short or no safetensors file; download it again"
                )
            header = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    return _refs(path, _decode(path, header), 8 + length, file_nbytes)


def _decode(path: Path, header: bytes) -> dict[str, _Entry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: malformed safetensors header ({error}); download it again") from None


def _refs(path: Path, entries: dict[str, _Entry], start: int, file_nbytes: int) -> dict[str, TensorRef]:
    refs: dict[str, TensorRef] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        low, high = entry.data_offsets
        if not end <= low <= high:
            raise ConfigError(f"{path}: tensor {name} at bytes {low}..{high} overlaps another; download it again")
        if start + high > file_nbytes:
            raise ConfigError(
                f"{path}: cut short: tensor {name} ends at byte {start + high}, the file at {file_nbytes}; "
                "download it again"
            )
        if len(entry.shape) > MAX_DIMENSIONS or not all(0 <= extent <= MAX_EXTENT for extent in entry.shape):
            raise ConfigError(f"{path}: tensor {name} has shape {show(list(entry.shape))}; download it again")
        itemsize = ITEMSIZE.get(entry.dtype)
        if itemsize is not None and math.prod(entry.shape) * itemsize != high - low:
            raise ConfigError(
                f"{path}: tensor {name} is {entry.dtype} {list(entry.shape)} but takes {high - low} bytes; "
                "download it again"
            )
        refs[name] = TensorRef(path, start + low, high - low, entry.dtype, entry.shape)
        end = high
    return refs
