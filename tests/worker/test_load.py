"""Loading, seen from the worker's process: against a copy engine that never answers."""

import asyncio
from pathlib import Path

import pytest
import zmq.asyncio

from copyengine.checkpoint.random_model import write_random_model
from copyengine.protocol import Detach, Done, Failed, Reply, Request
from copyengine.protocol import Load as BankLoad
from copyengine.wire.errors import PeerTimeout
from copyengine.wire.loop import run
from copyengine.wire.rpc_server import Call, RpcServer
from tests.worker.test_building import SIZES
from worker.compute import ComputeThread
from worker.config import WorkerConfig
from worker.copy_engine_link import CopyEngineLink
from worker.load import EngineLoader
from worker.protocol import Load


@pytest.mark.parametrize("answered", [0, 1])
def test_the_deadline_of_the_load_is_the_copy_engines_too(tmp_path: Path, answered: int) -> None:
    """It is asked to let go of what a dead worker of this name left, then to load, and never answers one of them."""
    write_random_model(tmp_path, SIZES)

    async def main() -> None:
        context = zmq.asyncio.Context()
        asked: list[Request] = []

        async def never(call: Call[Request, Reply]) -> Reply:
            asked.append(call.request)
            if len(asked) <= answered:
                return Done()
            await asyncio.Event().wait()
            raise AssertionError

        server: RpcServer[Request, Reply] = RpcServer(context, Request, never, Failed)
        config = WorkerConfig(copy_engine=server.bind("tcp://127.0.0.1:0"))
        serving = asyncio.create_task(server.serve())
        link = CopyEngineLink(context, config, "run")
        loader = EngineLoader(config, "run", link)
        async with asyncio.timeout(20):
            with pytest.raises(PeerTimeout, match=r"0\.3 s"):
                await loader(Load(str(tmp_path), deadline_s=0.3), ComputeThread(), lambda _: None)
        assert [type(request) for request in asked] == [Detach, BankLoad][: answered + 1]
        loader.close()
        assert await link.close()
        serving.cancel()
        await server.close()
        context.term()

    run(main(), "selector")
