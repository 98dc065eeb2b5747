"""`python -m scheduler.http`: serves HTTP as a client of a running scheduler, until told to stop."""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from copyengine.checkpoint.directory import read_config
from copyengine.wire import cli
from copyengine.wire.errors import ConfigError
from copyengine.wire.lifecycle import Listening, Ready, announce
from copyengine.wire.logs import Log, configure_logging
from copyengine.wire.process import Orders, refuse, run_process
from scheduler.client import Client
from scheduler.http.app import App
from scheduler.http.config import HttpConfig
from scheduler.http.default_sampling import read_default_sampling
from scheduler.http.front import Front
from scheduler.http.listening import is_loopback, open_listener, reachable_url, read_key, url
from scheduler.http.routes import ROUTES
from scheduler.http.server import HttpServer
from scheduler.tokenize import load_text_codec

log = Log(__name__)


async def serve(config: HttpConfig, orders: Orders) -> int:
    """Serve until drained; cancelling it stops at once. The exit code. ConfigError if the start is refused."""
    key = read_key(config.api_key)
    listener = open_listener(config.http_host, config.http_port)
    with listener:
        address = url(config.http_host, listener.getsockname()[1])
        announce(Listening(reachable_url(config.http_host, listener.getsockname()[1])))
        if not is_loopback(config.http_host):
            log.warning("http_open", url=address, detail=f"other machines may reach it{_open_to_all(key)}")
        text = load_text_codec(Path(config.model), read_config(Path(config.model), config.hf_overrides))
        default_sampling = read_default_sampling(Path(config.model))
        async with Client(config.scheduler) as client:
            front = Front(config, client, text, model_name(config), default_sampling)
            try:
                return await _serve(front, App(front, ROUTES, key), listener, orders)
            finally:
                front.close()


async def _serve(front: Front, app: App, listener: socket.socket, orders: Orders) -> int:
    server = asyncio.create_task(HttpServer(app).run_on(listener))
    drained = asyncio.create_task(_drain(front, orders))
    try:
        announce(Ready({"model": front.model}))
        await asyncio.wait({server, drained}, return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            server.result()
        return 0
    finally:
        front.end()
        drained.cancel()
        server.cancel()
        await asyncio.wait({server, drained})


async def _drain(front: Front, orders: Orders) -> None:
    await orders.drain.wait()
    await front.drain()


def model_name(config: HttpConfig) -> str:
    """The name clients see, as the scheduler has it."""
    return config.served_model_name or Path(os.path.abspath(config.model)).name


def _open_to_all(key: bytes) -> str:
    return "" if key else "; anyone there may use it: set --api-key"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    try:
        config = cli.parse(HttpConfig, argv, "python -m scheduler.http")
    except ConfigError as error:
        return refuse(error)
    configure_logging(config.log_level, "http")
    return run_process(lambda orders: serve(config, orders), config.event_loop, config.parent_pipe)


if __name__ == "__main__":
    sys.exit(main())
