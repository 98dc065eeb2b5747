"""The front's socket side: uvicorn inside our own event loop, from the first connection to the last."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from scheduler.http.connection import KEEP_ALIVE_S, Connection, allow_open_files

STOP_NOTICE_S = 1
"""Seconds that answers have to end when the process stops, and then connections: their last events are on their way
by then, and with both there is time left of STOP_GRACE_S."""


class HttpServer(uvicorn.Server):
    """Serves `app` on a socket that listens already. Signals are the process's business."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_NOTICE_S,
            )
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what junk clients send is no news

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield

    async def run_on(self, listener: socket.socket) -> None:
        """Serve until cancelled; then who is still being answered has STOP_NOTICE_S, and is cut off."""
        allow_open_files()
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            tasks = self.server_state.tasks
            if tasks:
                await asyncio.wait(tasks, timeout=STOP_NOTICE_S)
            for task in tasks:
                task.cancel()
            self.should_exit = True
            await serving
            raise
