"""Which event loop a process runs on."""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from copyengine.wire.errors import ConfigError

EventLoop = Literal["auto", "uvloop", "selector"]
T = TypeVar("T")


class SelectorLoop(asyncio.SelectorEventLoop):
    """The selector loop, which a signal wakes.

    On Windows `select` goes on waiting although a signal came, and the signal's handler runs when it returns: without
    this, Ctrl-C would be seen when the next message comes. Signals reach the main thread alone, so elsewhere it is the
    plain loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self._signalled: tuple[socket.socket, socket.socket] | None = None
        if threading.current_thread() is threading.main_thread():
            self._signalled = receiving, sending = socket.socketpair()
            for end in self._signalled:
                end.setblocking(False)
            self.add_reader(receiving, _drain, receiving)
            signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """As any loop's. Signals wake nothing from then on."""
        super().close()
        if self._signalled is not None:
            signal.set_wakeup_fd(-1)
            for end in self._signalled:
                end.close()
            self._signalled = None


def _drain(receiving: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        receiving.recv(4096)


def resolve(name: EventLoop) -> Literal["uvloop", "selector"]:
    """The loop that `name` means here: auto is uvloop where it is installed. ConfigError for uvloop where it is not."""
    if name == "selector":
        return "selector"
    try:
        import uvloop  # noqa: F401
    except ImportError:
        if name == "uvloop":
            raise ConfigError(
                "--event-loop uvloop: uvloop is not installed here; use --event-loop selector or install uvloop"
            ) from None
        return "selector"
    return "uvloop"


def loop_factory(name: EventLoop) -> Callable[[], asyncio.AbstractEventLoop]:
    """A factory for asyncio.Runner. Never the Proactor loop of Windows: zmq.asyncio cannot use it."""
    if resolve(name) == "selector" or sys.platform == "win32":
        return SelectorLoop
    import uvloop

    return uvloop.new_event_loop


def run(main: Coroutine[Any, Any, T], event_loop: EventLoop) -> T:
    """Run `main` to its end on the chosen loop."""
    with asyncio.Runner(loop_factory=loop_factory(event_loop)) as runner:
        return runner.run(main)
