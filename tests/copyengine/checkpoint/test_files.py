"""Files: what the system is told of reads to come, and that they do without."""

import os
from pathlib import Path

import pytest

from copyengine.checkpoint.files import Files

DATA = bytes(range(256)) * 4


@pytest.mark.parametrize("has_advice", [True, False])
def test_reads_to_come_are_told_once_where_that_is_possible(
    tmp_path: Path, has_advice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each file up to the furthest `stop`; what is read is the file's either way."""
    told: list[tuple[int, int]] = []
    if has_advice:
        monkeypatch.setattr(os, "posix_fadvise", lambda _, start, n, advice: told.append((start, n)), raising=False)
    else:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(DATA)
    target = bytearray(10)
    with Files() as files:
        for path, offset, stop in (
            (paths[0], 100, 600), (paths[0], 300, 600), (paths[0], 600, 0), (paths[0], 610, 900), (paths[1], 5, 50),
        ):  # fmt: skip
            files.read_into(path, offset, memoryview(target), stop)
            assert target == DATA[offset : offset + 10]
    assert told == ([(100, 500), (610, 290), (5, 45)] if has_advice else [])
