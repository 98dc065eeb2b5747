"""How much host memory can be had: what the machine has free, and what control groups (containers) leave of it."""

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def host_nbytes() -> int:
    """Bytes of host memory that this process and those it starts could take now."""
    machine = int(psutil.virtual_memory().available)
    return min([machine, *left_by_cgroups()])


def left_by_cgroups(mounted: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[int]:
    """What each control group above this process leaves, of those that have a limit: files that are only cached give
    way, all else does not. Nothing where there are no such groups."""
    for group in _groups(mounted, own):
        for limit, usage, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, used = _number(group / limit), _number(group / usage)
            if most is not None and used is not None:
                yield max(0, most - max(0, used - _cached(group / "memory.stat", cached)))


def _groups(mounted: Path, own: Path) -> Iterator[Path]:
    """The directories of this process's groups and of those above them, as far as they can be seen from here."""
    try:
        lines = own.read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = mounted / controllers
        inner = Path(path.lstrip("/"))
        yield from (base / each for each in (inner, *inner.parents) if (base / each).is_dir())


def _number(file: Path) -> int | None:
    """What the file says; None if there is no such file, or no limit in it."""
    try:
        return int(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _cached(file: Path, name: str) -> int:
    try:
        rows = (line.split() for line in file.read_text("utf-8").splitlines())
        return next((int(row[1]) for row in rows if row[0] == name), 0)
    except OSError:
        return 0
