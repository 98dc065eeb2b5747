"""The one thread that the model runs on. No torch in here: what it is given brings it."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs calls one after the other, in the order they were given, while the event loop stays free.

    A daemon thread: a process that ends does not wait for a long step.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    async def run(self, call: Callable[[], T]) -> T:
        """What `call()` returns or raises. A call whose caller gave up before its turn is left out."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.put((call, loop, future))
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
            call, loop, future = self._calls.get()
            result, error = None, None
            try:
                result = None if future.cancelled() else call()
            except BaseException as raised:  # goes to the caller, whatever it is
                error = raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the process is ending


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
