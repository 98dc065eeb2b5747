"""The parent's side of `lifecycle`: start a child process, hear its events, ask it to stop, end it.

Children are plain `subprocess.Popen` processes watched from threads, because the selector loop of Windows has no
subprocess support. Everything they report lands in one queue that the parent reads.
"""

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from copyengine.wire.lifecycle import STOP_GRACE_S, Event, Peer, order_line, parse_event

KILLED_S = 10.0
"""Seconds that the system may take to end all that were killed: it gives back pinned memory and a GPU's context first.
One that hangs in a driver is left to the system, so that our own end does not hang, too."""

PIPE_S = 0.5
"""Seconds in which the last events of a process that has ended are read: they lie in the pipe. It has no end as long as
a process that inherited it lives, and for that nobody waits."""

STUCK = -9
"""Its exit code then, which it will have."""


class Said(Struct, frozen=True):
    """Child `name` reported `event`."""

    name: str
    event: Event


class Exited(Struct, frozen=True):
    """Child `name` ended with exit code `code` (negative: by that signal)."""

    name: str
    code: int


class Told(Struct, frozen=True):
    """The parent itself was told something: the name of a signal."""

    signal: str


Notice = Said | Exited | Told
Notices = queue.SimpleQueue[Notice]


def _own_group() -> dict[str, Any]:
    """Popen's options that put a child into a process group of its own.

    A terminal sends Ctrl-C to the whole group of its foreground process, also to a child that still imports and
    handles no signals yet; so the parent alone gets it, and tells its children through their pipes. Ctrl-Z too reaches
    the parent alone: the children go on serving, and are heard again when it continues. A parent that is gone is
    noticed by the pipe's end, which needs no group.
    """
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"process_group": 0}


class Child:
    """One running `python -m module` with pipes to its standard input and output, out of reach of Ctrl-C."""

    def __init__(self, name: str, module: str, argv: Sequence[str], notices: Notices) -> None:
        self.name = name
        self._notices = notices
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **_own_group()
        )
        self._reader = threading.Thread(target=self._read, name=f"{name}-events", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def drain(self) -> None:
        """Ask it to finish what runs and take nothing new."""
        self._tell(order_line("drain"))

    def introduce(self, peer: Peer) -> None:
        """Tell it that a process it works with was started anew."""
        self._tell(order_line(peer))

    def ask_whether_alive(self) -> None:
        """Have it say Alive. It may be stopped and read nothing: a second question too soon may fill the pipe."""
        self._tell(order_line("alive"))

    def ask_to_stop(self) -> None:
        """Close its standard input: it stops at once."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # it is gone already, with our last line unread
            stdin.close()

    def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Ask it to stop, kill it if it has not ended `grace_s` later; its exit code."""
        self.ask_to_stop()
        if not self.ends(grace_s):
            self.kill()
        return self.collect(KILLED_S)

    def ends(self, wait_s: float) -> bool:
        """Wait for its end; whether it came within `wait_s`, which may be negative: then it has ended already."""
        try:
            self._process.wait(max(0.0, wait_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def collect(self, wait_s: float) -> int:
        """Its exit code once it has ended and its events are read; STUCK if it does not end within `wait_s`."""
        if not self.ends(wait_s):
            return STUCK
        self._reader.join(PIPE_S)
        return self._process.wait(0)

    def kill(self) -> None:
        """End it the hard way; `stop` or `collect` still has to be called."""
        self._process.kill()

    def _tell(self, line: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone: its Exited is on the way
            stdin.write(line)
            stdin.flush()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                event = parse_event(line)
                if event is not None:
                    self._notices.put(Said(self.name, event))
        self._notices.put(Exited(self.name, self._process.wait()))
