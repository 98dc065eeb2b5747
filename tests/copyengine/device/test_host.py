"""Shared memory segments: round trips within and across processes, and what is left of a process that is killed.

Child processes run with `-W error`; the resource tracker reports its complaints on standard error, which must be empty.
"""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from copyengine.device import CLEARED, FAILED, LANDED, RELEASED, Run
from copyengine.device import ledger as ledger_module
from copyengine.device.host import (
    NAME_CHARS,
    HostCopyDevice,
    HostWorkerDevice,
    attach_segment,
    create_segment,
    reclaim_stale,
)
from copyengine.protocol import MemoryHandle
from copyengine.wire.errors import ConfigError, CopyFailed, PeerDied, PeerTimeout, WireError


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ledger of the test's own, empty at its end: what a test makes it must free."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = ledger_module.directory()
    yield directory
    assert list(directory.iterdir()) == []


def python(code: str, tmp_path: Path) -> "subprocess.Popen[str]":
    prelude = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\nfrom copyengine.device.host import *\n"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", prelude + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def gone(handle: MemoryHandle) -> bool:
    try:
        attach_segment(handle).close()
    except PeerDied:
        return True
    return False


@pytest.mark.parametrize("nbytes", [1, 127, 4096, 4097, 3 << 20])
def test_two_mappings_share_exactly_these_bytes(nbytes: int) -> None:
    owner = create_segment("run", "pool", nbytes)
    other = attach_segment(owner.handle)
    assert owner.array.shape == other.array.shape == (nbytes,) and not owner.array.any()
    owner.array[:] = np.arange(nbytes, dtype=np.uint64).astype(np.uint8)
    assert np.array_equal(owner.array, other.array)
    other.close()
    owner.close()
    assert gone(owner.handle)


@pytest.mark.parametrize("owner_first", [True, False])
def test_arrays_outlive_close(owner_first: bool) -> None:
    """A view taken before close reads the same after it, and the name is gone."""
    owner = create_segment("run", "pool", 1000)
    other = attach_segment(owner.handle)
    views = owner.array[5:9], other.array[5:9].view(np.uint32)
    owner.array[:] = 7
    for segment in (owner, other) if owner_first else (other, owner):
        segment.close()
        segment.close()
        assert segment.array.size == 0
    assert gone(owner.handle)
    assert views[0].tolist() == [7] * 4 and views[1].tolist() == [0x07070707]


def test_the_ledger_names_the_owner_while_the_segment_is(ledger: Path) -> None:
    segment = create_segment("run", "pool", 1)
    (entry,) = ledger.iterdir()
    name, pid, _ = entry.name.split("@")
    assert name == segment.handle.name and int(pid) == psutil.Process().pid
    assert reclaim_stale() == [] and not gone(segment.handle)
    segment.close()


@pytest.mark.parametrize("label", ["x", "w" * 100, "a/b c:ü"])
def test_names_are_short_plain_and_never_the_same(label: str) -> None:
    segments = [create_segment("run", label, 1) for _ in range(20)]
    names = {segment.handle.name for segment in segments}
    assert len(names) == 20
    assert all(len(name) <= NAME_CHARS and name.isascii() and "/" not in name for name in names)
    for segment in segments:
        segment.close()


def test_more_than_there_is_is_a_config_error_that_names_the_bytes() -> None:
    with pytest.raises(ConfigError, match=str(1 << 50)):
        create_segment("run", "pool", 1 << 50)
    with pytest.raises(ValueError, match="0 bytes"):
        create_segment("run", "pool", 0)


def test_an_allocation_tells_how_far_it_is_and_can_be_stopped(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pieces and one byte; then somebody has enough at the second piece, and nothing is left."""
    monkeypatch.setattr("copyengine.device.host.RESERVE_NBYTES", 4096)
    told: list[int] = []
    segment = create_segment("run", "x", 3 * 4096 + 1, told.append)
    assert told == [4096, 4096, 4096, 1]
    segment.close()

    def stop(_: int) -> None:
        names.extend(path.name.partition("@")[0] for path in ledger.iterdir())
        if len(names) == 2:
            raise KeyError("enough")

    names: list[str] = []
    with pytest.raises(KeyError):
        create_segment("run", "x", 3 * 4096 + 1, stop)
    assert len(names) == 2 and gone(MemoryHandle("shm", names[0], 1))


def test_a_process_that_ends_now_leaves_nothing(tmp_path: Path) -> None:
    """A thread of it would never end, and its segment is in use."""
    child = python(
        "import threading\nsegment = create_segment('run', 'x', 4096)\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "print(segment.handle.name, flush=True)\nend_now(3)\n",
        tmp_path,
    )
    out, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (3, "") and gone(MemoryHandle("shm", out.strip(), 4096))


def test_a_handle_that_lies_is_refused() -> None:
    """In its length; in its kind, though the name is a segment's."""
    segment = create_segment("run", "pool", 100)
    with pytest.raises(WireError, match="cuda_ipc"):
        attach_segment(MemoryHandle("cuda_ipc", segment.handle.name, 100))
    for nbytes in (0, -1, 1 << 30):
        with pytest.raises(WireError, match="not"):
            attach_segment(MemoryHandle("shm", segment.handle.name, nbytes))
    segment.close()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
def test_no_room_for_open_files_is_not_called_a_lack_of_memory(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause and the remedy are named; the fixture sees that nothing is left."""
    monkeypatch.setattr("copyengine.device.host._Shared", Mock(side_effect=OSError(error, os.strerror(error))))
    with pytest.raises(ConfigError, match=r"open files.*ulimit -n") as raised:
        create_segment("run", "pool", 100)
    assert "memory, raise" not in str(raised.value) and "bytes" not in str(raised.value)


def test_many_threads_make_map_and_free(capfd: pytest.CaptureFixture[str]) -> None:
    """Owner and user in one process, as with the copy engine as a thread: the tracker never complains."""

    def work() -> None:
        for _ in range(50):
            owner = create_segment("run", "pool", 64)
            attach_segment(owner.handle).close()
            owner.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capfd.readouterr().err == ""


def test_a_user_that_ends_leaves_the_segment(tmp_path: Path) -> None:
    """The tracker below Python 3.13 would remove it. The user maps it, writes, and ends without closing."""
    segment = create_segment("run", "pool", 10)
    h = segment.handle
    child = python(f"s = attach_segment(MemoryHandle('shm', {h.name!r}, 10)); s.array[3] = 9", tmp_path)
    assert child.communicate(timeout=30) == ("", "") and child.returncode == 0
    assert segment.array[3] == 9 and not gone(h)
    segment.close()


def test_segments_of_a_killed_owner_are_reclaimed_by_two_at_once(tmp_path: Path) -> None:
    make = "s = [create_segment('dead', 'pool', 10) for _ in range(8)]\n"
    child = python(make + "print(*[x.handle.name for x in s], flush=True)\ninput()", tmp_path)
    assert child.stdout is not None
    names = child.stdout.readline().split()
    assert reclaim_stale() == []  # it lives
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass  # not waited for yet: dead all the same
    mine = create_segment("alive", "pool", 10)
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(reclaim_stale())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name for part in found for name in part} == set(names)
    assert all(gone(MemoryHandle("shm", name, 10)) for name in names) and not gone(mine.handle)
    mine.close()
    assert child.communicate(timeout=30) == ("", "")


def test_an_entry_of_another_process_with_the_same_pid_is_stale(ledger: Path) -> None:
    """Our own pid, but a start time an hour before ours; and an entry whose segment never came to be."""
    segment = create_segment("run", "pool", 10)
    (entry,) = ledger.iterdir()
    name, pid, start = entry.name.split("@")
    entry.rename(ledger / f"{name}@{pid}@{int(start) - 3_600_000}")
    (ledger / f"never@{pid}@1").touch()
    assert reclaim_stale() == [name] and gone(segment.handle)
    segment.close()  # no error although the name is gone


def test_what_is_no_entry_is_left_alone(ledger: Path) -> None:
    """Names that are no plain segment's, numbers that are none, a directory; a segment that may not be opened."""
    names = ["..@1@1", "a b@1@1", "@1@1", "x", "x@1", "x@y@1", "x@1@y", "x@1@1@1", "x@\u0661@1", "x" * 99 + "@1@1"]
    for name in names:
        (ledger / name).touch()
    (ledger / "directory@1@1").mkdir()
    assert reclaim_stale() == []
    assert sorted(path.name for path in ledger.iterdir()) == sorted([*names, "directory@1@1"])
    for name in names:
        (ledger / name).unlink()
    (ledger / "directory@1@1").rmdir()


def test_a_segment_that_the_system_refuses_to_open_is_not_ours(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ledger / f"theirs@{psutil.Process().pid}@1").touch()
    monkeypatch.setattr("copyengine.device.host._Shared", Mock(side_effect=PermissionError(13, "denied")))
    assert reclaim_stale() == [] and list(ledger.iterdir()) == []


def test_a_ledger_that_cannot_be_written_is_a_config_error(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(ConfigError, match=f"{ledger}.*No space"):
            create_segment("run", "pool", 1)
    ledger.rmdir()
    ledger.touch()
    with pytest.raises(ConfigError, match=f"{ledger}.*another temporary"):
        reclaim_stale()
    ledger.unlink()
    ledger.mkdir()


def test_flags_round_trip() -> None:
    """The worker's words against the copy engine's: clear, write, wait, release."""
    worker, copier = HostWorkerDevice(), HostCopyDevice()
    flags = worker.allocate("run", "flags", 12)
    theirs = copier.open(flags.handle)
    for value in (LANDED, FAILED):
        worker.clear_flag(flags, 1)
        assert theirs.array.view(np.uint32)[1] == CLEARED
        threading.Timer(0.02, copier.write_flag, ["demand", theirs, 1, value]).start()
        assert worker.wait_flag(flags, 1, 10, lambda: None) == value
    with pytest.raises(PeerTimeout, match=r"0\.05 s"):
        worker.wait_flag(flags, 0, 0.05, lambda: None)
    worker.release_flags(flags)
    assert theirs.array.view(np.uint32).tolist() == [RELEASED] * 3
    theirs.close()
    flags.close()


def test_copies_land_where_told_and_nowhere_else() -> None:
    """Two runs of a bank, one of which ends where the pool does; past it, and once the pool is closed, none is made."""
    worker, copier = HostWorkerDevice(), HostCopyDevice()
    pool = worker.allocate("run", "pool", 100)
    bank = copier.allocate_bank("run", "bank", 40)
    bank.array[:] = np.arange(1, 41)
    theirs = copier.open(pool.handle)
    assert (theirs.nbytes, bank.nbytes) == (100, 40)
    copier.copy("demand", bank, theirs, [Run(0, 10, 5), Run(10, 70, 30)])
    assert copier.is_done(None)
    assert pool.array.tolist() == [0] * 10 + [1, 2, 3, 4, 5] + [0] * 55 + list(range(11, 41))
    with pytest.raises(CopyFailed, match="outside"):
        copier.copy("background", bank, theirs, [Run(0, 71, 30)])
    theirs.close()
    assert theirs.nbytes == 0
    with pytest.raises(CopyFailed, match="outside"):
        copier.copy("demand", bank, theirs, [Run(0, 0, 1)])
    copier.close()
    bank.close()
    pool.close()
