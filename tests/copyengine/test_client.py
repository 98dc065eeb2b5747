"""The client against a server that answers what it should not: each method raises what its docstring says.

How it works with the real server is in test_server.py.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import zmq.asyncio

from copyengine.client import CopyEngineClient
from copyengine.protocol import Attach, Done, Failed, LoadProgress, MemoryHandle, Reply, Request
from copyengine.wire.errors import ConfigError, PeerDied, PeerTimeout, RequestRefused, SlotstreamError, WireError
from copyengine.wire.loop import run
from copyengine.wire.rpc_server import Call, RpcServer

HANDLE = MemoryHandle("shm", "x", 1)
Operation = Callable[[CopyEngineClient], Awaitable[object]]
VALUES: list[Operation] = [
    lambda client: client.load("m", "bfloat16", deadline_s=5),
    lambda client: client.attach(Attach("w", HANDLE, HANDLE, HANDLE, 1)),
    lambda client: client.stats(),
]
DONE: list[Operation] = [lambda client: client.wake("w"), lambda client: client.detach("w")]


def against(reply: Callable[[Request], Reply], test: Callable[[CopyEngineClient], Awaitable[None]]) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()

        async def handle(call: Call[Request, Reply]) -> Reply:
            await call.progress(LoadProgress("experts", 1, 2))
            return reply(call.request)

        server: RpcServer[Request, Reply] = RpcServer(context, Request, handle, Failed)
        client = CopyEngineClient(context, server.bind("inproc://client-test"))
        serving = asyncio.create_task(server.serve())
        try:
            await test(client)
        finally:
            await client.close()
            serving.cancel()
            await server.close()
            context.term()

    run(main(), "selector")


@pytest.mark.parametrize(
    ("code", "error"), [("config", ConfigError), ("wire", WireError), ("peer_died", PeerDied), ("x", RequestRefused)]
)
def test_failed_is_raised_as_what_it_stands_for(code: str, error: type[SlotstreamError]) -> None:
    async def test(client: CopyEngineClient) -> None:
        for operation in VALUES + DONE:
            with pytest.raises(error, match="why"):
                await operation(client)

    against(lambda _: Failed(code, "why"), test)


def test_an_answer_to_another_question_is_a_wire_error() -> None:
    async def test(client: CopyEngineClient) -> None:
        for operation in VALUES:
            with pytest.raises(WireError, match="Done"):
                await operation(client)

    against(lambda _: Done(), test)


def test_progress_is_told() -> None:
    async def test(client: CopyEngineClient) -> None:
        seen: list[LoadProgress] = []
        with pytest.raises(RequestRefused):
            await client.load("m", "float32", on_progress=seen.append)
        assert seen == [LoadProgress("experts", 1, 2)]

    against(lambda _: Failed("x", ""), test)


def test_a_server_that_is_silent_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens: a time-out; the end of what is gone went well; a closed client says so."""
    monkeypatch.setattr("copyengine.client.ANSWER_S", 0.05)

    async def main() -> None:
        context = zmq.asyncio.Context()
        client = CopyEngineClient(context, "tcp://127.0.0.1:1")
        with pytest.raises(PeerTimeout):
            await client.stats()
        call = asyncio.create_task(client.shutdown())
        await asyncio.sleep(0.01)
        await client.close()  # every call ends with PeerDied
        await call
        with pytest.raises(PeerDied):
            await client.stats()
        context.term()

    run(main(), "selector")
