"""The worker's client against servers that answer wrongly, late or not at all; test_server.py has the right answers."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import zmq.asyncio

from copyengine.wire.errors import (
    ConfigError,
    CopyFailed,
    PeerDied,
    PeerTimeout,
    RequestRefused,
    SlotstreamError,
    WireError,
)
from copyengine.wire.loop import run
from copyengine.wire.rpc_server import Call, RpcServer
from worker import client as worker_client
from worker import protocol
from worker.client import WorkerClient
from worker.protocol import Done, Failed, Load, RunStep, SequenceStep

STEP = RunStep("decode", [SequenceStep(1, [1], 0, [0])])
Handler = Callable[[Call[protocol.Request, protocol.Reply]], Coroutine[Any, Any, protocol.Reply]]


def against(handler: Handler, main: Callable[[WorkerClient, Callable[[], Coroutine[Any, Any, None]]], Any]) -> None:
    """Run `main` with a client of a server that answers by `handler`, and with what kills the server."""

    async def go() -> None:
        context = zmq.asyncio.Context()
        server: RpcServer[protocol.Request, protocol.Reply] = RpcServer(context, protocol.Request, handler, Failed)
        client = WorkerClient(context, server.bind("tcp://127.0.0.1:0"))
        serving = asyncio.create_task(server.serve())

        async def die() -> None:
            serving.cancel()
            await server.close()

        async with asyncio.timeout(60):
            await main(client, die)
        await die()
        await client.close()
        context.term()

    run(go(), "selector")


async def never(call: Call[protocol.Request, protocol.Reply]) -> protocol.Reply:
    await asyncio.Event().wait()
    raise AssertionError


async def done(call: Call[protocol.Request, protocol.Reply]) -> protocol.Reply:
    return Done()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("config", ConfigError),
        ("peer_died", PeerDied),
        ("peer_timeout", PeerTimeout),
        ("copy_failed", CopyFailed),
        ("wire", WireError),
        ("not_loaded", RequestRefused),
    ],
)
def test_a_failed_reply_is_raised_as_the_error_of_its_code(code: str, kind: type[SlotstreamError]) -> None:
    async def fail(call: Call[protocol.Request, protocol.Reply]) -> protocol.Reply:
        return Failed(code, "why")

    async def main(client: WorkerClient, die: object) -> None:
        for call in (
            client.load(Load("m"), 5),
            client.release([1], 5),
            client.stats(),
            client.layer_stats(5),
            client.residency(5),
            client.flush(5),
            client.verify_slots(5),
        ):
            with pytest.raises(kind, match="why"):
                await call
        assert await client.run_step(STEP, 5) == Failed(code, "why"), "a failed step is a value"

    against(fail, main)


def test_a_silent_worker_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "ANSWER_S", 0.05)

    async def main(client: WorkerClient, die: object) -> None:
        for call in (
            client.load(Load("m"), 0.05),
            client.run_step(STEP, 0.05),
            client.release([1], 0.05),
            client.stats(),
        ):
            with pytest.raises(PeerTimeout, match=r"within 0\.05 s"):
                await call
        assert not client.lost.is_set()

    against(never, main)


def test_a_worker_that_dies_ends_the_call_at_once() -> None:
    asked = asyncio.Event()

    async def hear(call: Call[protocol.Request, protocol.Reply]) -> protocol.Reply:
        asked.set()
        return await never(call)

    async def main(client: WorkerClient, die: Callable[[], Coroutine[Any, Any, None]]) -> None:
        call = asyncio.create_task(client.run_step(STEP, 60))
        await asked.wait()
        await die()
        with pytest.raises(PeerDied):
            await call
        assert client.lost.is_set()

    against(hear, main)


def test_an_answer_to_another_question_is_a_wire_error() -> None:
    async def main(client: WorkerClient, die: object) -> None:
        for call in (client.load(Load("m"), 5), client.run_step(STEP, 5), client.stats()):
            with pytest.raises(WireError, match="answered with Done"):
                await call

    against(done, main)
