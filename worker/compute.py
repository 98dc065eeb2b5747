"""The one thread that the model runs on. No torch in here: what it is given brings it."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs calls one after the other, in the order they were given, while the event loop stays free.

    A daemon thread: a process that ends does not wait for a long step.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    async def run(self, call: Callable[[], T], discard: Callable[[T], None] = lambda _: None) -> T:
        """What `call()` returns or raises. A call whose caller gave up before its turn is left out.

        A result that comes after the caller gave up goes to `discard`, which must free what it holds.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.put(_Call(call, discard, loop, future))
        return await future

    async def idle(self, deadline_s: float) -> bool:
        """Wait until all that was given is done; False if it is not after `deadline_s`."""
        try:
            async with asyncio.timeout(deadline_s):
                await self.run(lambda: None)
        except TimeoutError:
            return False
        return True

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call.future.cancelled():
                continue
            result, error = None, None
            try:
                result = call.function()
            except BaseException as raised:  # goes to the caller, whatever it is
                error = raised
            try:
                call.loop.call_soon_threadsafe(_settle, call, result, error)
            except RuntimeError:  # the loop is closed: the process is ending
                if error is None:
                    call.discard(result)
                return


class _Call(NamedTuple):
    function: Callable[[], Any]
    discard: Callable[[Any], None]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


def _settle(call: _Call, result: Any, error: BaseException | None) -> None:
    if call.future.cancelled():
        if error is None:
            call.discard(result)
    elif error is None:
        call.future.set_result(result)
    else:
        call.future.set_exception(error)
