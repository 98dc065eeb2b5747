"""The outermost edge of a process: one main coroutine, orders from outside, one exit code."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from copyengine.wire.errors import ConfigError, SlotstreamError, code_of
from copyengine.wire.lifecycle import EXIT_CONFIG, Alive, Order, Peer, StartFailed, announce, watch_parent
from copyengine.wire.logs import Log
from copyengine.wire.loop import EventLoop, loop_factory

log = Log(__name__)


class Orders:
    """What the process was told from outside its event loop. `stop` is set by the parent's end, SIGTERM or SIGINT.

    Whether it is alive is answered here: by the loop, not by the thread that hears the question, which would also
    answer for a loop that hangs.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.stop = asyncio.Event()
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()  # that were started anew
        self._loop = asyncio.get_running_loop()

    def listen(self, parent_pipe: bool) -> None:
        """Take orders from now on, from signals and, with `parent_pipe`, from standard input."""
        signal.signal(signal.SIGTERM, lambda *_: self._give("stop"))
        if parent_pipe:
            watch_parent(self._give)
        else:
            signal.signal(signal.SIGINT, lambda *_: self._give("stop"))

    def _give(self, order: Order) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are ending anyway
            self._loop.call_soon_threadsafe(self._take, order)

    def _take(self, order: Order) -> None:
        match order:
            case "drain":
                self.drain.set()
            case "stop":
                self.stop.set()
            case "alive":
                announce(Alive())
            case peer:
                self.peers.put_nowait(peer)


def run_process(
    main: Callable[[Orders], Coroutine[Any, Any, int | None]], event_loop: EventLoop, parent_pipe: bool
) -> int:
    """Run `main` until it returns or `orders.stop` is set, which cancels it; the exit code: main's, or 0.

    A start that is refused (ConfigError) or fails is announced as StartFailed, see `refuse`. An exception group of one
    stands for that one.
    """

    async def supervise() -> int:
        orders = Orders()
        orders.listen(parent_pipe)
        work = asyncio.create_task(main(orders))
        stop = asyncio.create_task(orders.stop.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not work.done():
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            return 0
        return work.result() or 0

    try:
        with asyncio.Runner(loop_factory=loop_factory(event_loop)) as runner:
            return runner.run(supervise())
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, SlotstreamError):
            return refuse(cause, parent_pipe)
        log.failed("process_failed", cause, words=True)
        announce(StartFailed("internal", f"{type(cause).__name__}: {cause}"))
        return 1


def _cause(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def refuse(error: SlotstreamError, parent_pipe: bool = False) -> int:
    """Say why the process does not run; the exit code. A parent that reads the announcement tells the person."""
    announce(StartFailed(code_of(error), str(error)))
    if not parent_pipe:
        sys.stderr.write(f"error: {error}\n")
    return EXIT_CONFIG if isinstance(error, ConfigError) else 1
