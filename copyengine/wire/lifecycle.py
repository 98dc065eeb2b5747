"""How a process tells its parent where it stands, and learns that it should stop.

A child writes one JSON line per event to standard output: `Listening` once its socket is bound, any number of
`Progress`, then `Ready` or `StartFailed`. The parent holds the child's standard input: the line `drain` asks it to
finish what runs and take nothing new; end of file, which a killed parent causes too, asks it to stop at once. Pipes
work the same on every platform and need no signals.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

EXIT_CONFIG = 2
"""Exit code of a refused start."""

STOP_GRACE_S = 5.0
"""Seconds a process may take to end after its parent is gone before it ends itself the hard way."""


class Listening(Struct, frozen=True, tag=True):
    """The process's socket is bound to `endpoint`."""

    endpoint: str


class Progress(Struct, frozen=True, tag=True):
    """Loading goes on; `phase` names what is being loaded."""

    phase: str
    done_nbytes: int
    total_nbytes: int


class Ready(Struct, frozen=True, tag=True):
    """The process serves. `facts` are for people and for the parent's Ready block."""

    facts: dict[str, str | int | float | bool]


class StartFailed(Struct, frozen=True, tag=True):
    """The start was refused (`code` "config") or failed; the process exits after this line."""

    code: str
    detail: str


Event = Listening | Progress | Ready | StartFailed
_decoder = msgspec.json.Decoder(Event)


def announce(event: Event) -> None:
    """Write `event` to standard output as one line. A parent that is gone is no error here: the watch ends us."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        pass


def parse_event(line: bytes) -> Event | None:
    """The event in one line of a child's output; None for a line that is none (a library's print)."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


def watch_parent(on_command: Callable[[Literal["drain", "stop"]], None]) -> None:
    """Call `on_command` from a thread for each command of the parent's, "stop" last.

    Interrupt signals are the parent's to handle, so they are ignored from here on. If the process still lives
    STOP_GRACE_S after the stop, it is ended with exit code 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        stdin, unread = sys.stdin.fileno(), b""
        while data := os.read(stdin, 4096):  # not sys.stdin.buffer: an exit while a thread is inside it aborts Python
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                if line.strip() == b"drain":
                    on_command("drain")
        on_command("stop")
        threading.Event().wait(STOP_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
