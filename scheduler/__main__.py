"""`python -m scheduler`: listens, has its workers load the model, serves until told to stop."""

import asyncio
import sys
from collections.abc import Sequence

import zmq.asyncio

from copyengine.wire import cli
from copyengine.wire.errors import ConfigError
from copyengine.wire.lifecycle import Listening, Progress, Ready, StartFailed, announce
from copyengine.wire.logs import configure_logging
from copyengine.wire.process import Orders, refuse, run_process
from scheduler.collected_stats import collecting
from scheduler.config import SchedulerConfig
from scheduler.lane import Lane, collapsed, running
from scheduler.preflight import check_stats_file, listen_endpoint
from scheduler.rejoin import Rejoiner
from scheduler.server import SchedulerServer
from scheduler.startup import build_service, close_all, load_workers, model_name, ready_facts


async def serve(config: SchedulerConfig, orders: Orders) -> int:
    """Serve until drained; cancelling it stops at once. The exit code. ConfigError if the start is refused."""
    check_stats_file(config)
    context = zmq.asyncio.Context()
    server = SchedulerServer(context, model_name(config), restarts=config.parent_pipe)
    listening: asyncio.Task[None] | None = None
    try:
        endpoint = server.bind(listen_endpoint(config))
        announce(Listening(endpoint))
        listening = asyncio.create_task(server.serve())
        return await _load_and_serve(config, context, server, orders, listening)
    finally:
        if listening:  # it takes nothing that `close` would not see
            listening.cancel()
            await asyncio.wait({listening})
        await server.close()
        context.term()


async def _load_and_serve(
    config: SchedulerConfig,
    context: zmq.asyncio.Context,
    server: SchedulerServer,
    orders: Orders,
    listening: asyncio.Task[None],
) -> int:
    """The exit code. Raises what ends `listening`: a process that hears nobody must not live on."""

    def heard(progress: Progress) -> None:
        server.hear(progress)
        announce(progress)

    workers, loaded = await load_workers(context, config, heard)
    try:
        service = build_service(config, workers, loaded)
    except BaseException:
        await close_all(workers)
        raise
    try:
        async with (
            running(service.lanes) as collapse,
            collecting(config.collect_stats, model_name(config), lambda: [lane.worker for lane in service.lanes]),
        ):
            server.open(service)
            announce(Ready(ready_facts(config, service, loaded)))
            drained = asyncio.create_task(_drain(server, orders))
            rejoining = asyncio.create_task(Rejoiner(context, config, service, announce).run(orders.peers))
            try:
                waits = {drained, collapse, rejoining, listening}
                ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for endless in ended & {rejoining, listening}:
                    endless.result()  # an error
                return _exit_code(service.lanes)
            finally:
                drained.cancel()
                rejoining.cancel()
                await asyncio.wait({rejoining})
                await server.end()
    finally:
        await close_all([lane.worker for lane in service.lanes])


def _exit_code(lanes: list[Lane]) -> int:
    """Of an end that nothing outside forced. A collapse is announced with its cause."""
    if not collapsed(lanes):
        return 0
    announce(StartFailed("internal", next(lane.death for lane in lanes if lane.broken)))
    return 1


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
