"""DirectFiles: against the file's own bytes, with the system's direct reads, without, and where they are refused."""

import errno
import os
import random
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from copyengine import available
from copyengine.checkpoint import direct, reader
from copyengine.checkpoint.direct import DirectFiles, is_better_direct
from copyengine.checkpoint.model import expert_file_nbytes, open_model
from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.checkpoint.reader import read_experts
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError

NBYTES = 50_001


@pytest.fixture(params=["as the system has it", "refused at open", "refused at read", "none"])
def refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How direct reads go; the buffer has two blocks."""
    monkeypatch.setattr(direct, "BUFFER_NBYTES", 2 * direct.BLOCK_NBYTES)
    how = str(request.param)
    flag = direct.O_DIRECT
    open_file = os.open

    def refuse(path: Path, flags: int, *more: Any) -> int:
        if flags & flag:
            raise OSError(errno.EINVAL, "refused")
        return open_file(path, flags, *more)

    class RefusingFile(FileIO):
        refused = False

        def readinto(self, buffer: Any) -> int:
            if not RefusingFile.refused:
                RefusingFile.refused = True
                raise OSError(errno.EINVAL, "refused")
            return super().readinto(buffer)

    if how == "none":
        monkeypatch.setattr(direct, "O_DIRECT", 0)
    elif flag and how == "refused at open":
        monkeypatch.setattr(direct.os, "open", refuse)  # type: ignore[attr-defined]
    elif flag and how == "refused at read":
        monkeypatch.setattr(direct, "FileIO", RefusingFile)
    return how


def read(files: DirectFiles, path: Path, offset: int, nbytes: int, stop: int = 0) -> bytes:
    target = bytearray(nbytes)
    files.read_into(path, offset, memoryview(target), stop)
    return bytes(target)


@pytest.mark.usefixtures("refusal")
def test_any_bytes_of_any_file(tmp_path: Path) -> None:
    """From odd offsets, of odd lengths, none at all, up to the end of a file that ends inside a block; of two files in
    turn. Behind the end it is cut short, and a file that is not there is named."""
    rng = random.Random(0)
    content = {tmp_path / name: rng.randbytes(NBYTES) for name in ("a", "b")}
    for path, data in content.items():
        path.write_bytes(data)
    with DirectFiles() as files:
        for i in range(100):
            path = tmp_path / "ab"[i // 10 % 2]
            offset = rng.randrange(NBYTES)
            nbytes = min(rng.choice((0, 1, 100, 4096, 9000, NBYTES)), NBYTES - offset)
            stop = rng.choice((0, NBYTES, offset + nbytes))
            assert read(files, path, offset, nbytes, stop) == content[path][offset : offset + nbytes]
        with pytest.raises(ConfigError, match=r"a: cut short at byte 50001"):
            read(files, tmp_path / "a", NBYTES - 1, 2)
        with pytest.raises(ConfigError, match="cannot be read"):
            read(files, tmp_path / "c", 0, 1)
        assert read(files, tmp_path / "b", 7, 5) == content[tmp_path / "b"][7:12]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_read_directly_are_those_read_through_the_cache(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, by several threads, in batches smaller than a buffer and larger; each block is asked for once."""
    monkeypatch.setattr(direct, "BUFFER_NBYTES", 4 * direct.BLOCK_NBYTES)
    write_random_model(tmp_path, Sizes(layers=2, hidden=64, intermediate=40, experts=12, experts_per_token=2))
    model = open_model(tmp_path)
    record = record_layout(model.spec, dtype)
    assert record is not None
    asked: list[int] = []
    fill = DirectFiles._fill

    def count(self: DirectFiles, at: int, stop: int) -> None:
        fill(self, at, stop)
        asked.append(self._end - self._start)

    monkeypatch.setattr(DirectFiles, "_fill", count)
    for batch_nbytes in (10_000, 1 << 20):
        monkeypatch.setattr(reader, "BATCH_NBYTES", batch_nbytes)
        asked.clear()
        cached, straight = ([np.zeros((12, record.record_nbytes), np.uint8) for _ in range(2)] for _ in range(2))
        assert read_experts(model, record, cached, lambda _: None, direct=False) == expert_file_nbytes(model)
        assert not asked
        assert read_experts(model, record, straight, lambda _: None, direct=True) == expert_file_nbytes(model)
        assert all(np.array_equal(a, b) for a, b in zip(cached, straight, strict=True))
        edges = 2 * direct.BLOCK_NBYTES * (expert_file_nbytes(model) // batch_nbytes + 2)
        assert sum(asked) <= expert_file_nbytes(model) + edges


@pytest.mark.parametrize(
    ("machine", "container", "better"), [(999, None, True), (1000, None, False), (5000, 999, True), (5000, 1000, False)]
)
def test_direct_is_better_where_the_cache_could_not_hold_it(
    machine: int, container: int | None, better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the machine has free, and what the limit of a container leaves of it."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=machine))
    monkeypatch.setattr(available, "left_by_cgroups", lambda: iter([] if container is None else [container]))
    monkeypatch.setattr(direct, "O_DIRECT", 1)
    assert is_better_direct(1000) == better
    monkeypatch.setattr(direct, "O_DIRECT", 0)
    assert not is_better_direct(1000)
