"""What control groups leave: against trees of files as Linux has them, of both versions, in and out of a container."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from copyengine import available
from copyengine.available import host_nbytes, left_by_cgroups

GB = 10**9
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def group(path: Path, names: tuple[str, str, str], limit: str, used: int, cached: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\nslab 7\n")


def left(root: Path, lines: str) -> list[int]:
    own = root / "own"
    own.write_text(lines)
    return sorted(left_by_cgroups(root / "cgroup", own))


def test_every_group_above_counts_and_files_that_are_cached_give_way(tmp_path: Path) -> None:
    tree = tmp_path / "cgroup"
    group(tree / "a", V2, str(20 * GB), 6 * GB, 2 * GB)
    group(tree / "a" / "b", V2, str(10 * GB), 3 * GB, 1 * GB)
    group(tree / "a" / "b" / "c", V2, "max", 3 * GB, 1 * GB)
    assert left(tmp_path, "0::/a/b/c\n") == [8 * GB, 16 * GB]


def test_in_a_container_the_own_group_is_the_root(tmp_path: Path) -> None:
    """Whether its path is shown from inside or from the machine, where it cannot be seen."""
    group(tmp_path / "cgroup", V2, str(10 * GB), 11 * GB, 0)
    assert left(tmp_path, "0::/\n") == [0]
    assert left(tmp_path, "0::/kubepods/pod1\n") == [0]


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    group(tmp_path / "cgroup" / "memory" / "docker" / "x", V1, str(4 * GB), 2 * GB, GB)
    group(tmp_path / "cgroup" / "cpu" / "docker" / "x", V1, str(GB), 0, 0)
    assert left(tmp_path, "9:memory:/docker/x\n4:cpu:/docker/x\n0::/\n") == [3 * GB]


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(left_by_cgroups(tmp_path / "none", tmp_path / "neither")) == []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7))
    monkeypatch.setattr(available, "left_by_cgroups", lambda: iter(()))
    assert host_nbytes() == 7
    monkeypatch.setattr(available, "left_by_cgroups", lambda: iter((9, 5)))
    assert host_nbytes() == 5


def test_of_this_machine() -> None:
    assert 0 < host_nbytes() <= psutil.virtual_memory().total
