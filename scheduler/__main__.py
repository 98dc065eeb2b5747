"""`python -m scheduler`: listens, has its workers load the model, serves until told to stop."""

import asyncio
import sys
from collections.abc import Sequence

import zmq.asyncio

from copyengine.wire import cli
from copyengine.wire.errors import ConfigError
from copyengine.wire.lifecycle import Listening, Ready, announce
from copyengine.wire.logs import configure_logging
from copyengine.wire.process import Orders, refuse, run_process
from scheduler.config import SchedulerConfig
from scheduler.lane import running
from scheduler.server import SchedulerServer
from scheduler.startup import build_service, close_all, listen_endpoint, load_workers, model_name, ready_facts


async def serve(config: SchedulerConfig, orders: Orders) -> None:
    """Serve until drained; cancelling it stops at once. ConfigError if the start is refused."""
    context = zmq.asyncio.Context()
    server = SchedulerServer(context, model_name(config))
    listening: asyncio.Task[None] | None = None
    try:
        endpoint = server.bind(listen_endpoint(config))
        announce(Listening(endpoint))
        listening = asyncio.create_task(server.serve())
        await _load_and_serve(config, context, server, endpoint, orders)
    finally:
        await server.close()
        if listening:
            listening.cancel()
        context.term()


async def _load_and_serve(
    config: SchedulerConfig, context: zmq.asyncio.Context, server: SchedulerServer, endpoint: str, orders: Orders
) -> None:
    workers, loaded = await load_workers(context, config, announce)
    try:
        service = build_service(config, workers, loaded)
        async with running(service.lanes):
            server.open(service)
            announce(Ready(ready_facts(config, endpoint, service, loaded)))
            await orders.drain.wait()
            await server.drain()
    finally:
        await close_all(workers)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    try:
        config = cli.parse(SchedulerConfig, argv, "python -m scheduler")
    except ConfigError as error:
        return refuse(error)
    configure_logging(config.log_level, "scheduler")
    return run_process(lambda orders: serve(config, orders), config.event_loop, config.parent_pipe)


if __name__ == "__main__":
    sys.exit(main())
