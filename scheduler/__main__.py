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


async def serve(config: SchedulerConfig, orders: Orders) -> int:
    """Serve until drained; cancelling it stops at once. The exit code. ConfigError if the start is refused."""
    context = zmq.asyncio.Context()
    server = SchedulerServer(context, model_name(config))
    listening: asyncio.Task[None] | None = None
    try:
        endpoint = server.bind(listen_endpoint(config))
        announce(Listening(endpoint))
        listening = asyncio.create_task(server.serve())
        return await _load_and_serve(config, context, server, orders)
    finally:
        await server.close()
        if listening:
            listening.cancel()
        context.term()


async def _load_and_serve(
    config: SchedulerConfig, context: zmq.asyncio.Context, server: SchedulerServer, orders: Orders
) -> int:
    workers, loaded = await load_workers(context, config, announce)
    try:
        service = build_service(config, workers, loaded)
        async with running(service.lanes) as collapse:
            server.open(service)
            announce(Ready(ready_facts(config, service, loaded)))
            drained = asyncio.create_task(_drain(server, orders))
            try:
                await asyncio.wait({drained, collapse}, return_when=asyncio.FIRST_COMPLETED)
                return int(any(lane.broken for lane in service.lanes))  # why is in the log
            finally:
                drained.cancel()
                await server.end()
    finally:
        await close_all(workers)


async def _drain(server: SchedulerServer, orders: Orders) -> None:
    await orders.drain.wait()
    await server.drain()


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
