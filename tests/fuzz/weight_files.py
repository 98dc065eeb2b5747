"""safetensors headers and their index: against safetensors' own reading, and against each tensor's place in the file.

What we take, lies in its file, overlaps nothing and has its shape's size; what safetensors takes, we take alike.
"""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import safetensors

from copyengine.checkpoint.directory import locate
from copyengine.checkpoint.header import ITEMSIZE, TensorRef, read_header
from copyengine.wire.errors import ConfigError
from tests.fuzz.source import NASTY, Source, as_json, changed, damaged

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
EMPTY = {"dtype": "BF16", "shape": [0], "data_offsets": [1, 1]}
HEADERS: list[Any] = [
    {"a": ENTRY, "b": {"dtype": "U8", "shape": [16], "data_offsets": [16, 32]}, "__metadata__": {"format": "pt"}},
    {"a": ENTRY},
    {},
    {"e": {**ENTRY, "dtype": "F8_E4M3", "shape": [], "data_offsets": [0, 1]}, "z": EMPTY},
]  # fmt: skip
BODY = bytes(range(32))
INDEX = {"metadata": {"total_size": 32}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
LENGTHS = (0, 1, 7, 8, 100_000_000, 100_000_001, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = [
    "../one.safetensors",
    "/etc/passwd",
    "sub/one.safetensors",
    "ONE.safetensors",
    "one.safetensors\0",
    "C:one.safetensors",
]


def one_input(data: bytes) -> None:
    source = Source(data)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if source.byte() < 128:
            path = directory / "model.safetensors"
            path.write_bytes(_file(source))
            _compare(path)
        else:
            _index(source, directory)


def _file(source: Source) -> bytes:
    header = changed(source, source.pick(HEADERS))
    text = as_json(source, header)
    length = source.pick(LENGTHS) if source.byte() < 16 else len(text)
    whole = length.to_bytes(8, "little") + text + BODY[: 32 if source.byte() < 200 else source.byte() % 33]
    return damaged(source, whole) if source.byte() < 32 else whole


def _compare(path: Path) -> None:
    try:
        ours = read_header(path)
    except ConfigError as error:
        assert str(path) in str(error) and len(str(error)) < 2000
        ours = None
    data = path.read_bytes()
    try:
        theirs: Any = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except Exception:
        theirs = None
    if ours is not None:
        _check_places(ours, len(data))
    if theirs is not None and all(one["dtype"] in ITEMSIZE for one in theirs.values()):
        assert ours is not None and ours.keys() == theirs.keys()
        for name, ref in ours.items():
            assert list(ref.shape) == theirs[name]["shape"] and data[ref.offset :][: ref.nbytes] == theirs[name]["data"]


def _check_places(refs: dict[str, TensorRef], file_nbytes: int) -> None:
    end = 8
    for ref in sorted(refs.values(), key=lambda ref: (ref.offset, ref.nbytes)):
        assert end <= ref.offset <= ref.offset + ref.nbytes <= file_nbytes
        assert ref.dtype not in ITEMSIZE or math.prod(ref.shape) * ITEMSIZE[ref.dtype] == ref.nbytes
        end = ref.offset + ref.nbytes


def _index(source: Source, outside: Path) -> None:
    """Of a directory beside which there are such files too."""
    directory = outside / "model"
    directory.mkdir()
    for place in (outside, directory):
        for name in ("one", "two"):
            text = json.dumps({"a": ENTRY, "b": {**ENTRY, "data_offsets": [16, 32]}}).encode()
            (place / f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + BODY)
    index = changed(source, INDEX)
    if source.byte() < 96 and isinstance(index, dict) and isinstance(index.get("weight_map"), dict):
        index["weight_map"][source.pick(("a", "b", "c"))] = source.pick([*NAMES, f"{outside}/one.safetensors", *NASTY])
    (directory / "model.safetensors.index.json").write_bytes(as_json(source, index))
    try:
        refs = locate(directory)
    except ConfigError as error:
        assert len(str(error)) < 2000
        return
    assert all(ref.path.parent == directory and ref.path.is_file() for ref in refs.values())
