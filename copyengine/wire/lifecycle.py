"""How a process tells its parent where it stands, and learns that it should stop.

A child writes one JSON line per event to standard output: `Listening` once its socket is bound, any number of
`Progress`, then `Ready` or `StartFailed`. The parent holds the child's standard input: the line `drain` asks it to
finish what runs and take nothing new, the line `peer NAME ENDPOINT` says that a process it works with was started
anew, which it answers with `Joined` or `PeerLost`; the line `alive` is answered with `Alive`, from the event loop that
answers all else; end of file, which a killed parent causes too, asks it to stop at once. Pipes work the same on every
platform and need no signals.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
from msgspec import Struct

EXIT_CONFIG = 2
"""Exit code of a refused start."""

EXIT_PEER = 3
"""Exit code of a process that ends because one that it needs is gone or silent."""

LINE_NBYTES = 4096
"""A longer line on standard input is no order."""

STOP_GRACE_S = 5.0
"""Seconds a process may take to end when it is told to, or its parent is gone, before it is ended the hard way: a
worker's last step and the freeing of its memory have 2 s each. Fewer would leave pinned memory to the system."""


class Listening(Struct, frozen=True, tag=True):
    """The process's socket is bound to `endpoint`."""

    endpoint: str


class Progress(Struct, frozen=True, tag=True):
    """Loading goes on; `phase` names what is being loaded, `worker` whose it is where there are several."""

    phase: str
    done_nbytes: int
    total_nbytes: int
    worker: str = ""


class Ready(Struct, frozen=True, tag=True):
    """The process serves. `facts` are for people and for the parent's Ready block."""

    facts: dict[str, str | int | float | bool]


class StartFailed(Struct, frozen=True, tag=True):
    """The start was refused (`code` "config") or failed, or a process that served cannot go on; it exits after this."""

    code: str
    detail: str


class Joined(Struct, frozen=True, tag=True):
    """The process works with `peer` at `endpoint`, which it was told of while it ran."""

    peer: str
    endpoint: str


class PeerLost(Struct, frozen=True, tag=True):
    """The process cannot work, or cannot go on working, with `peer` at `endpoint`; it does so with the others."""

    peer: str
    endpoint: str
    code: str
    detail: str


class Alive(Struct, frozen=True, tag=True):
    """The process's event loop turns. Said only when asked: nothing piles up before a parent that is stopped."""


Event = Listening | Progress | Ready | StartFailed | Joined | PeerLost | Alive
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


class Peer(Struct, frozen=True):
    """Process `name` was started anew and listens on `endpoint`."""

    name: str
    endpoint: str


Word = Literal["drain", "alive"]
Order = Word | Literal["stop"] | Peer


def order_line(order: Word | Peer) -> bytes:
    """What the parent writes into a child's standard input. There is none for "stop", which is the end of file."""
    return f"peer {order.name} {order.endpoint}\n".encode() if isinstance(order, Peer) else f"{order}\n".encode()


def parse_order(line: bytes) -> Word | Peer | None:
    """The order in one line of standard input; None for a line that is none."""
    match line.split():
        case [b"drain"]:
            return "drain"
        case [b"alive"]:
            return "alive"
        case [b"peer", name, endpoint] if name.isascii() and endpoint.isascii():
            return Peer(name.decode(), endpoint.decode())
    return None


def watch_parent(on_order: Callable[[Order], None]) -> None:
    """Call `on_order` from a thread for each order of the parent's, "stop" last.

    Interrupt signals are the parent's to handle, so they are ignored from here on. If the process still lives
    STOP_GRACE_S after the stop, it is ended with exit code 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        for line in _lines(sys.stdin.fileno()):
            order = parse_order(line)
            if order is not None:
                on_order(order)
        on_order("stop")
        threading.Event().wait(STOP_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _lines(file: int) -> Iterator[bytes]:
    """The complete lines of `file`, but for those of more than LINE_NBYTES.

    Not of sys.stdin.buffer: an exit while a thread is inside it aborts Python.
    """
    unread, too_long = b"", False
    while data := os.read(file, LINE_NBYTES):
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            if not too_long and len(line) <= LINE_NBYTES:
                yield line
            too_long = False
        if len(unread) > LINE_NBYTES:
            unread, too_long = b"", True
