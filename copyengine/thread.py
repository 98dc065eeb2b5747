"""The copy engine as a thread of the worker process, over inproc://: where no other process can map the pool."""

import contextlib
import secrets
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import zmq.asyncio
from msgspec.structs import replace

from copyengine.config import CopyEngineConfig
from copyengine.server import CopyEngineServer
from copyengine.wire.errors import PeerDied
from copyengine.wire.logs import Log
from copyengine.wire.loop import run

START_S = 10.0
"""Seconds that the thread may take to bind its socket, which takes milliseconds; then the worker's start is refused."""

STOP_S = 8.0
"""Seconds that it may take to end: what its copy loop and its loader may take, and a little more."""

log = Log(__name__)


class CopyEngineThread:
    """A CopyEngineServer with a thread and an event loop of its own. Usable as a context manager."""

    def __init__(
        self, config: CopyEngineConfig, context: zmq.asyncio.Context, on_death: Callable[[], None] = lambda: None
    ) -> None:
        """`config.endpoint` is replaced by an inproc one of `context`, whose clients alone can reach it.

        `on_death` is called from the thread if the server ends by an error: inproc has no broken connections.
        """
        self.endpoint = f"inproc://copyengine-{secrets.token_hex(4)}"
        self._config = replace(config, endpoint=self.endpoint)
        self._context: zmq.asyncio.Context = zmq.asyncio.Context.shadow(context)
        self._on_death = on_death
        self._server: CopyEngineServer | None = None
        self._bound = threading.Event()
        self._clean = True
        self._thread = threading.Thread(target=self._run, name="copyengine", daemon=True)

    def start(self) -> str:
        """Start the thread; the endpoint, which is bound. PeerDied if it could not be."""
        self._thread.start()
        if not self._bound.wait(START_S):
            raise PeerDied(f"the copy engine's thread did not start within {START_S:g} s")
        if self._server is None:
            raise PeerDied("the copy engine's thread did not start; see the log")
        return self.endpoint

    def stop(self) -> bool:
        """End the server and free its memory; clients must be closed before the context is.

        False if a copy or a read is stuck: then something of it lives on, and the process must not wait for it.
        """
        if self._server is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
                self._server.stop()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.error("copy_thread_stuck", after_s=STOP_S)
        return not self._thread.is_alive() and self._clean

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            run(self._serve(), self._config.event_loop)
        except Exception as error:
            log.failed("copy_thread_failed", error, words=True)
            self._on_death()
        finally:
            self._bound.set()

    async def _serve(self) -> None:
        server = CopyEngineServer(self._config, self._context, local=True)
        try:
            server.bind()
            self._server = server
            self._bound.set()
            await server.run()
        finally:
            self._clean = await server.close()
