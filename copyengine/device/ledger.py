"""Which process owns which shared memory segment, so that what a killed run left behind can be removed.

One empty file per segment in a directory of this user's: its name is `{segment}@{pid}@{start}`, where `start` is the
owner's creation time in milliseconds. The file is made before the segment and removed after it, so that there is no
moment at which a segment has none, and a file is never half written.
"""

import getpass
import os
import tempfile
from pathlib import Path

import psutil

from copyengine.wire.errors import ConfigError

CLOCK_SLACK_MS = 2000
"""A process's creation time is computed from the boot time, which moves a little when the clock is set."""


def directory() -> Path:
    """The ledger of this user, made if absent. ConfigError if it belongs to somebody else."""
    user = str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
    path = Path(tempfile.gettempdir()) / f"slotstream-{user}"
    path.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to another user; remove it or set another temporary directory")
    return path


def enter(name: str) -> Path:
    """Note that this process owns segment `name`, before it is made; the file to remove after it is gone."""
    path = directory() / f"{name}@{os.getpid()}@{_start_ms(psutil.Process())}"
    path.touch()
    return path


def own() -> list[tuple[Path, str]]:
    """Files and names of this process's segments."""
    mine = f"@{os.getpid()}@{_start_ms(psutil.Process())}"
    return [(path, path.name.partition("@")[0]) for path in sorted(directory().iterdir()) if path.name.endswith(mine)]


def stale() -> list[tuple[Path, str]]:
    """Files and segment names whose owner is dead. Files of other forms are left alone."""
    found = []
    for path in sorted(directory().iterdir()):
        name, _, owner = path.name.partition("@")
        pid, _, start = owner.partition("@")
        if name and pid.isdecimal() and start.isdecimal() and not _lives(int(pid), int(start)):
            found.append((path, name))
    return found


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
