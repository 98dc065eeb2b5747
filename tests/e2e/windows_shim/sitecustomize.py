"""Takes away from a Python on Linux what Windows does not have. It runs at the start of every Python that has this
folder in PYTHONPATH, so in all children of such a one too.

Gone: uvloop, triton, fcntl and the other modules that only POSIX has (installed libraries may still import them:
those here are their builds for Linux), fork, Unix sockets, epoll, POSIX-only calls of os, signals but for the few
that Windows knows; of the event loop signal handlers, subprocesses, pipes. Changed: a selector takes sockets only; a
process is ended the hard way or not at all; a signal interrupts no wait of the main thread, its handler runs
afterwards. What Python's own modules for Linux are made of (os.waitpid, _posixsubprocess, ...) stays, and so does
what is different on Windows but there: file names, files in use, shared memory, the console.
"""

import asyncio
import builtins
import os
import select
import selectors
import signal
import socket
import stat
import subprocess
import sys
import threading
from typing import Any, NoReturn

from posix_only import (  # type: ignore[import-not-found]  # it lies beside this file
    LOOP_METHODS,
    MODULES,
    OS_NAMES,
    SIGNAL_CALLS,
    SIGNALS,
    WHEELS,
)

KEPT = ("O_NONBLOCK", "fchmod", "posix_spawn", "sched_getaffinity")
"""Of os: the halves for Linux of filelock, subprocess and os itself need them."""

_import = builtins.__import__
_kill = os.kill
_open_socket = socket.socket.__init__
_HARD = signal.SIGKILL


def import_as_on_windows(name: str, globals: Any = None, *rest: Any, **named: Any) -> Any:
    """ModuleNotFoundError for what only POSIX has, but to installed libraries: those are their builds for Linux."""
    if name.split(".")[0] in (*MODULES, *WHEELS) and "site-packages" not in ((globals or {}).get("__file__") or ""):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _import(name, globals, *rest, **named)


class SocketSelector(selectors.SelectSelector):
    """As `select` of Windows, which knows sockets only (ZeroMQ's descriptor is one there, an eventfd here)."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """OSError for a pipe, a file or a terminal."""
        key = super().register(fileobj, events, data)
        mode = os.fstat(key.fd).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISCHR(mode):
            self.unregister(fileobj)
            raise OSError(10038, "an operation was attempted on something that is not a socket")
        return key


def open_socket(self: socket.socket, family: int = -1, *rest: Any, **named: Any) -> None:
    """No Unix sockets. Their number itself stays: psutil's half for Linux names it."""
    if family == socket.AF_UNIX:
        raise OSError(10047, "an address incompatible with the requested protocol was used")
    _open_socket(self, family, *rest, **named)


def socketpair(*_: Any) -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection, as on Windows."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def not_implemented(*_: Any, **__: Any) -> NoReturn:
    """What the loop of Windows says to this call."""
    raise NotImplementedError


def kill(pid: int, number: int) -> None:
    """On Windows every number ends the process, 0 too. psutil asks with it whether one lives, as it does on Linux."""
    if sys._getframe(1).f_globals.get("__name__", "").split(".")[0] != "psutil":
        raise OSError(22, f"os.kill({pid}, {number}) would end the process on Windows")
    _kill(pid, number)


def terminate(self: "subprocess.Popen[Any]") -> None:
    """The hard way is the only one."""
    if self.poll() is None:
        _kill(self.pid, _HARD)


def raise_signal(number: int) -> None:
    """To the process: the calling thread is kept from signals here, and on Windows is not."""
    _kill(os.getpid(), number)


def keep_signals_from_main_thread() -> None:
    """Another thread takes them, so that none interrupts a wait of the main thread, and Python's handlers run after it.

    The mask is inherited through exec, so it is opened first.
    """
    every = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, every)
    threading.Thread(target=threading.Event().wait, name="signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, every)


def remove(module: Any, *names: str) -> None:
    """What there is of `names` in `module`."""
    for name in names:
        vars(module).pop(name, None)


keep_signals_from_main_thread()
builtins.__import__ = import_as_on_windows
remove(os, *(name for name in OS_NAMES if name not in KEPT))
remove(signal, *(name for name in dir(signal) if name.startswith("SIG") and name[3:4] != "_" and name not in SIGNALS))
remove(signal, *SIGNAL_CALLS)
remove(select, "epoll", "poll")
remove(socket, "send_fds", "recv_fds")
for method in LOOP_METHODS:
    setattr(asyncio.SelectorEventLoop, method, not_implemented)
socket.socket.__init__ = open_socket  # type: ignore[method-assign]
selectors.DefaultSelector = SocketSelector  # type: ignore[misc,assignment]
socket.socketpair = socketpair  # type: ignore[assignment]
os.kill = kill
signal.raise_signal = raise_signal
subprocess.Popen.kill = subprocess.Popen.terminate = terminate  # type: ignore[method-assign]
