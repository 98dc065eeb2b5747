"""Files: reads into several places, what the system is told of reads to come, and that they do without."""

import os
from pathlib import Path

import pytest

from copyengine.checkpoint.files import Files
from copyengine.wire.errors import ConfigError

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


@pytest.mark.parametrize("most_nbytes", [None, 1, 7])
@pytest.mark.parametrize("has_preadv", [True, False])
def test_one_read_into_several_places(
    tmp_path: Path, has_preadv: bool, most_nbytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's own bytes one after the other, also into empty places and more than one call takes, where the system
    reads into one place at a time, and where it returns less than was asked for. A file that is too short is named."""
    if not has_preadv:
        monkeypatch.delattr(os, "preadv", raising=False)
    elif not hasattr(os, "preadv"):
        pytest.skip("this system has no preadv")
    elif most_nbytes is not None:
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda file, places, at: real(file, [places[0][:most_nbytes]], at))
    path = tmp_path / "a"
    path.write_bytes(DATA * 3)
    for sizes in ([0], [5], [3, 0, 1, 400, 0], [1] * 2100):
        places = [bytearray(size) for size in sizes]
        with Files() as files:
            files.read_all(path, 9, [memoryview(place) for place in places])
        assert b"".join(places) == (DATA * 3)[9 : 9 + sum(sizes)]
    with Files() as files, pytest.raises(ConfigError, match=r"a: cut short at byte 3072"):
        files.read_all(path, 3000, [memoryview(bytearray(70)), memoryview(bytearray(3))])
