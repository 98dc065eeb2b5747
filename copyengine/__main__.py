"""`python -m copyengine`: listens, is ready at once, loads when a worker asks for it."""

import sys
from collections.abc import Sequence

import zmq.asyncio

from copyengine.config import CopyEngineConfig
from copyengine.device.host import end_now, reclaim_stale
from copyengine.server import CopyEngineServer
from copyengine.wire import cli
from copyengine.wire.errors import ConfigError
from copyengine.wire.lifecycle import Listening, Ready, announce
from copyengine.wire.logs import configure_logging
from copyengine.wire.process import refuse, run_process


async def serve(config: CopyEngineConfig) -> None:
    """Serve until Shutdown; cancelling it stops at once. ConfigError if the start is refused."""
    context = zmq.asyncio.Context()
    try:
        server = CopyEngineServer(config, context)
    except BaseException:
        context.term()
        raise
    try:
        announce(Listening(server.bind()))
        reclaim_stale()
        announce(Ready({}))
        await server.run()
    finally:
        if not await server.close():
            end_now(1 if isinstance(sys.exception(), Exception) else 0)
        context.term()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    try:
        config = cli.parse(CopyEngineConfig, argv, "python -m copyengine")
    except ConfigError as error:
        return refuse(error)
    configure_logging(config.log_level, "copyengine")
    return run_process(lambda _: serve(config), config.event_loop, config.parent_pipe)


if __name__ == "__main__":
    sys.exit(main())
