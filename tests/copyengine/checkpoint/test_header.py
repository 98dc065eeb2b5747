"""read_header: against the safetensors library, and against damaged headers of every kind."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save, save_file

from copyengine.checkpoint.header import read_header
from copyengine.wire.errors import ConfigError


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_the_library_s_files_are_read(tmp_path: Path) -> None:
    tensors: dict[str, NDArray[Any]] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.array(3, np.float16),
        "none": np.zeros((0, 5), ml_dtypes.bfloat16),
        "bytes": np.arange(129, dtype=np.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors", {"format": "np"})
    refs = read_header(tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    assert set(refs) == set(tensors)
    for name, ref in refs.items():
        assert data[ref.offset : ref.offset + ref.nbytes] == tensors[name].tobytes()
        assert ref.shape == tensors[name].shape


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"", b""),
        (b"[]", b""),
        (b"{", b""),
        (b'{"a": 1}', b""),
        (b"\xff", b""),
        (b"[" * 100_000, b""),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"12341234"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"12341234"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"1234"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"123"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [1 << 70, (1 << 70) + 4]}}, b"1234"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "F32", "shape": [1 << 63, 0], "data_offsets": [0, 0]}}, b""),
        ({"a": {"dtype": "F32", "shape": [1] * 17, "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "F32", "shape": [2**62] * 1_000_000, "data_offsets": [0, 4]}}, b"1234"),
        ({"a": {"dtype": "F4", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
        (
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
            },
            b"12345678",
        ),
    ],
)
def test_malformed_headers_are_refused_by_file_name(tmp_path: Path, header: object, data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"x\.safetensors"):
        read_header(write(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [3, 2**63, 2**64 - 1, 100_000_001])
def test_header_lengths_beyond_the_file_or_the_limit(tmp_path: Path, length: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match="header"):
        read_header(tmp_path / "x.safetensors")


def test_element_types_of_later_versions_are_let_through(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, b"1234")
    assert read_header(path)["a"].nbytes == 4


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_header(tmp_path / "x.safetensors")


GOOD = save({"a": np.ones((3, 5), np.float32), "b": np.ones(7, np.float16)})


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, len(GOOD)), where=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255))
def test_no_damage_ends_in_anything_but_a_refusal(tmp_path: Path, cut: int, where: int, byte: int) -> None:
    """What we accept lies inside the file; what the library accepts, we accept (it refuses more: holes, tails)."""
    data = bytearray(GOOD)
    data[where] = byte
    path = tmp_path / "x.safetensors"
    path.write_bytes(data[:cut])
    try:
        library = len(safetensors.deserialize(bytes(data[:cut])))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        library = -1
    try:
        refs = read_header(path)
    except ConfigError:
        assert library == -1
        return
    assert all(0 <= ref.offset <= ref.offset + ref.nbytes <= cut for ref in refs.values())
