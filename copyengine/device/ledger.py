"""Which process owns which shared memory segment, so that what a killed run left behind can be removed.

One empty file per segment in a directory of this user's: its name is `{segment}@{pid}@{start}`, where `start` is the
owner's creation time in milliseconds. The file is made before the segment and removed after it, so that there is no
moment at which a segment has none, and a file is never half written.
"""

import getpass
import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path

import psutil

from copyengine.wire.errors import ConfigError

_ENTRY = re.compile(r"([A-Za-z0-9_-]{1,64})@([0-9]{1,10})@([0-9]{1,20})")
"""A file's name. What is no plain segment name must never reach the system as one."""

CLOCK_SLACK_MS = 2000
"""A process's creation time is computed from the boot time, which moves a little when the clock is set."""


def directory() -> Path:
    """The ledger of this user, made if absent. ConfigError if it cannot be made or belongs to somebody else."""
    user = str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
    try:
        path = Path(tempfile.gettempdir()) / f"slotstream-{user}"
        path.mkdir(mode=0o700, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as error:  # a file is in its place, say
        raise ConfigError(
            f"no directory slotstream-{user} to list shared memory in: {error}; "
            "remove what is in its place, or set another temporary directory"
        ) from None
    if hasattr(os, "getuid") and owner != os.getuid():
        raise ConfigError(f"{path} belongs to another user; remove it or set another temporary directory")
    return path


def enter(name: str) -> Path:
    """Note that this process owns segment `name`, before it is made; the file to remove after it is gone.

    ConfigError if the file cannot be made.
    """
    path = directory() / f"{name}@{os.getpid()}@{_start_ms(psutil.Process())}"
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"{path.parent}: {name} cannot be listed here: {error.strerror or error}") from None
    return path


def own() -> list[tuple[Path, str]]:
    """Files and names of this process's segments."""
    mine = os.getpid(), _start_ms(psutil.Process())
    return [(path, name) for path, name, *owner in _entries() if tuple(owner) == mine]


def stale() -> list[tuple[Path, str]]:
    """Files and segment names whose owner is dead. What is no entry is left alone."""
    return [(path, name) for path, name, pid, start_ms in _entries() if not _lives(pid, start_ms)]


def owned(names: Collection[str]) -> set[str]:
    """Those of `names` that are segments whose owner lives."""
    return {name for _, name, pid, start_ms in _entries() if name in names and _lives(pid, start_ms)}


def _entries() -> list[tuple[Path, str, int, int]]:
    """Each entry's file, segment, and its owner's process id and creation time."""
    paths = sorted(directory().iterdir())
    found = [(path, entry) for path in paths if (entry := _ENTRY.fullmatch(path.name)) and path.is_file()]
    return [(path, entry[1], int(entry[2]), int(entry[3])) for path, entry in found]


def _lives(pid: int, start_ms: int) -> bool:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return abs(_start_ms(process) - start_ms) <= CLOCK_SLACK_MS
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # somebody lives there whom we may not look at: not ours to judge
        return True


def _start_ms(process: psutil.Process) -> int:
    return int(process.create_time() * 1000)
