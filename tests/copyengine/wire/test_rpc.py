"""Request and reply over real sockets, on both event loops, against the module's promises.

One final reply per request, whatever happens; junk is counted and harms nobody; every wait ends.
"""

import asyncio
import contextlib
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from copyengine.wire import rpc_client, rpc_server
from copyengine.wire.errors import (
    ConfigError,
    CopyFailed,
    PeerDied,
    PeerError,
    PeerTimeout,
    RequestRefused,
    WireError,
)
from copyengine.wire.loop import EventLoop, run
from copyengine.wire.rpc_client import RpcClient
from copyengine.wire.rpc_server import Call, RpcServer

LOOPS: tuple[EventLoop, ...] = ("uvloop", "selector") if sys.platform != "win32" else ("selector",)


class Ask(Struct, frozen=True, tag=True):
    what: str
    number: int = 0


class Part(Struct, frozen=True, tag=True):
    number: int


class Answer(Struct, frozen=True, tag=True):
    what: str
    number: int


class Failed(Struct, frozen=True, tag=True):
    code: str
    detail: str


Reply = Part | Answer | Failed
Server = RpcServer[Ask, Reply]
Client = RpcClient[Ask, Reply]


async def handle(call: Call[Ask, Reply]) -> Reply:
    match call.request:
        case Ask("parts", number):
            for i in range(number):
                await call.progress(Part(i))
        case Ask("slow parts", number):
            for i in range(number):
                await asyncio.sleep(0.1)
                await call.progress(Part(i))
        case Ask("refuse", _):
            raise RequestRefused("queue_full", "256 wait")
        case Ask("copy", _):
            raise CopyFailed("did not land")
        case Ask("bug", _):
            raise ZeroDivisionError("a bug")
        case Ask("sleep", number):
            await asyncio.sleep(number / 1000)
        case Ask("too large", _):
            return Answer("2^70", 2**70)
        case Ask("surrogate", _):
            raise ConfigError("path \udcff")
    return Answer(call.request.what, call.request.number)


@asynccontextmanager
async def served(
    endpoint: str = "tcp://127.0.0.1:0", handler: Callable[[Call[Ask, Reply]], Awaitable[Reply]] = handle
) -> AsyncIterator[tuple[zmq.asyncio.Context, Server, str]]:
    context = zmq.asyncio.Context()
    server = Server(context, Ask, handler, Failed)
    bound = server.bind(endpoint)
    serving = asyncio.create_task(server.serve())
    try:
        yield context, server, bound
    finally:
        serving.cancel()
        await server.close()
        context.term()


@asynccontextmanager
async def connected(context: zmq.asyncio.Context, endpoint: str) -> AsyncIterator[Client]:
    client = Client(context, endpoint, Reply, (Answer, Failed), Failed, "server")
    try:
        yield client
    finally:
        await client.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def in_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    for loop in LOOPS:
        run(test(), loop)


@pytest.mark.parametrize("event_loop", LOOPS)
def test_replies_that_come_in_crowds_leave_others_their_turn(event_loop: EventLoop) -> None:
    """Whoever waits for a reply has it after READ_AT_ONCE others at most, and none is lost or comes out of order."""
    crowd = 900

    async def main() -> None:
        async with served() as (context, _, endpoint), connected(context, endpoint) as client:
            seen: list[int] = []
            most = 0
            async for reply in client.stream(Ask("parts", crowd), 10):
                (replies,) = client._calls.values()
                most = max(most, replies.qsize())
                seen += [reply.number] if isinstance(reply, Part) else []
                if len(seen) == 1:  # all others come while nobody reads
                    time.sleep(0.3)  # noqa: ASYNC251
            assert seen == list(range(crowd))
            assert 8 < most <= rpc_client.READ_AT_ONCE + 1

    run(main(), event_loop)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "inproc://rpc-test"])
def test_many_calls_at_once_each_get_their_own_answer(endpoint: str) -> None:
    """Sixty calls of two clients that end in the reverse order of their start."""

    async def test() -> None:
        async with (
            served(endpoint) as (context, _, bound),
            connected(context, bound) as one,
            connected(context, bound) as two,
        ):
            asked = [Ask("sleep", 60 - i) for i in range(60)]
            answers = await asyncio.gather(*((one, two)[i % 2].call(ask, 10) for i, ask in enumerate(asked)))
            assert answers == [Answer(ask.what, ask.number) for ask in asked]

    in_both_loops(test)


@pytest.mark.parametrize("count", [0, 1, 500])
def test_progress_comes_in_order_before_the_final_reply(count: int) -> None:
    async def test() -> None:
        async with served() as (context, _, bound), connected(context, bound) as client:
            replies = [reply async for reply in client.stream(Ask("parts", count), 10)]
            assert replies == [*map(Part, range(count)), Answer("parts", count)]
            assert await client.call(Ask("parts", count), 10) == replies[-1]

    in_both_loops(test)


def test_an_expected_reply_is_the_reply_and_others_are_errors() -> None:
    """Progress on the way is heard; a Failed is raised as what it stands for."""

    async def test() -> None:
        async with served() as (context, _, bound), connected(context, bound) as client:
            heard: list[Reply] = []
            assert await client.expect(Ask("parts", 3), Answer, 5, heard.append) == Answer("parts", 3)
            assert heard == [*map(Part, range(3))]
            with pytest.raises(RequestRefused) as refused:
                await client.expect(Ask("refuse"), Answer, 5)
            assert (refused.value.code, refused.value.detail) == ("queue_full", "256 wait")
            with pytest.raises(CopyFailed, match="did not land"):
                await client.expect(Ask("copy"), Answer, 5)
            with pytest.raises(WireError, match="the server answered with Answer"):
                await client.expect(Ask("x"), Part, 5)
            assert client._calls == {}

    in_both_loops(test)


@pytest.mark.parametrize("ask", [Ask("x", 2**70), Ask("\udcff")])
def test_what_cannot_be_encoded_is_refused_before_it_is_sent(ask: Ask) -> None:
    async def test() -> None:
        async with served() as (context, _, bound), connected(context, bound) as client:
            with pytest.raises(RequestRefused) as refused:
                await client.call(ask, 5)
            assert refused.value.code == "invalid_request"
            assert client._calls == {}
            assert await client.call(Ask("x"), 5) == Answer("x", 0)

    in_both_loops(test)


@pytest.mark.parametrize(
    "endpoint", ["foo", "localhost:5757", "http://127.0.0.1:1", "tcp://127.0.0.1", "", "tcp://\udcff:1"]
)
def test_an_endpoint_that_is_none_is_a_config_error_that_names_it(endpoint: str) -> None:
    """And nothing stays open, or the context could not end."""

    async def test() -> None:
        context = zmq.asyncio.Context()
        with pytest.raises(ConfigError) as refused:
            Client(context, endpoint, Reply, (Answer, Failed), Failed, "server")
        assert repr(endpoint) in str(refused.value)
        context.term()

    in_both_loops(test)


def test_every_failure_is_a_final_reply(caplog: pytest.LogCaptureFixture) -> None:
    """Codes by hand; the server goes on after each, and a bug is in the log."""

    async def test() -> None:
        async with served() as (context, _, bound), connected(context, bound) as client:
            assert await client.call(Ask("refuse"), 5) == Failed("queue_full", "256 wait")
            assert await client.call(Ask("copy"), 5) == Failed("copy_failed", "did not land")
            for ask in ("bug", "too large", "surrogate"):
                failed = await client.call(Ask(ask), 5)
                assert isinstance(failed, Failed) and failed.code == "internal", ask
                assert "a bug" not in failed.detail and "surrogate" not in failed.detail, "who is told may log it"
            assert await client.call(Ask("fine", 1), 5) == Answer("fine", 1)
            assert "event=call_failed" in caplog.text and "event=reply_unsendable" in caplog.text
            assert "a bug" not in caplog.text, "it may quote the request"

    in_both_loops(test)


def test_a_silent_server_is_a_time_out_and_progress_renews_it() -> None:
    """The late answer of the first call is dropped and not taken for the second's."""

    async def test() -> None:
        async with served() as (context, _, bound), connected(context, bound) as client:
            with pytest.raises(PeerTimeout, match=r"server .* within 0\.05 s"):
                await client.call(Ask("sleep", 200), 0.05)
            assert await client.call(Ask("slow parts", 12), 1) == Answer("slow parts", 12)
            assert client.dropped_frames == 0 and client._calls == {}

    in_both_loops(test)


def test_nobody_there_is_a_time_out() -> None:
    async def test() -> None:
        async with served() as (context, _, bound):
            pass
        context = zmq.asyncio.Context()
        async with connected(context, bound) as client:
            with pytest.raises(PeerTimeout):
                await client.call(Ask("x"), 0.1)
            with pytest.raises(PeerTimeout):
                await client.call(Ask("x"), 0.1)
        context.term()

    in_both_loops(test)


def test_a_server_that_goes_ends_the_calls_at_once() -> None:
    """Three calls with long deadlines; `lost` is set also for those who do not call."""

    async def test() -> None:
        context = zmq.asyncio.Context()
        async with served() as (_, server, bound):
            client = Client(context, bound, Reply, (Answer, Failed), Failed, "server")
            calls = [asyncio.create_task(client.call(Ask("sleep", 60_000), 60)) for _ in range(3)]
            await until(lambda: len(server._tasks) == 3)
            assert not client.lost.is_set()
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert [type(result) for result in results] == [PeerDied] * 3
        assert client.lost.is_set()
        await client.close()
        context.term()

    in_both_loops(test)


def test_a_client_finds_the_successor_which_sees_no_old_calls() -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        async with served() as (_, _, bound):
            client = Client(context, bound, Reply, (Answer, Failed), Failed, "server")
            assert await client.call(Ask("x", 1), 5) == Answer("x", 1)
        with pytest.raises((PeerTimeout, PeerDied)):
            await client.call(Ask("lost", 2), 0.2)
        seen: list[Ask] = []

        async def note(call: Call[Ask, Reply]) -> Reply:
            seen.append(call.request)
            return Answer("new", 0)

        async with served(bound, note):
            assert await client.call(Ask("y", 3), 5) == Answer("new", 0)
            assert seen == [Ask("y", 3)]
            await client.close()
        context.term()

    in_both_loops(test)


def test_the_last_reply_arrives_although_the_server_closes_after_it() -> None:
    """As with Shutdown: the handler itself ends the server. Eight times, for it was a race."""

    async def test() -> None:
        for _ in range(8):
            context = zmq.asyncio.Context()
            end = asyncio.Event()

            async def last(call: Call[Ask, Reply], end: asyncio.Event = end) -> Reply:
                asyncio.get_running_loop().call_soon(end.set)
                return Answer("bye", 0)

            async with served(handler=last) as (_, _, bound):
                client = Client(context, bound, Reply, (Answer, Failed), Failed, "server")
                call = asyncio.create_task(client.call(Ask("end"), 5))
                await end.wait()
            assert await call == Answer("bye", 0)
            await client.close()
            context.term()

    in_both_loops(test)


def test_replies_that_came_before_the_server_left_reach_a_client_that_was_busy() -> None:
    """Its event loop stands still from before they come until the connection has closed; an open call then ends."""

    async def test() -> None:
        async with answered_by_hand() as (router, client):
            calls = [asyncio.create_task(client.call(Ask("x"), 60)) for _ in range(21)]
            asked = [await router.recv_multipart() for _ in calls]
            sender: zmq.Socket[bytes] = zmq.Socket.shadow(router)
            for i, (peer, number, _) in enumerate(asked[:20]):
                sender.send_multipart([peer, number, msgspec.msgpack.encode(Answer("x", i))])
            time.sleep(0.2)  # noqa: ASYNC251
            router.close(linger=1000)
            time.sleep(0.3)  # noqa: ASYNC251
            answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
            assert answers[:20] == [Answer("x", i) for i in range(20)]
            assert isinstance(answers[20], PeerDied)

    in_both_loops(test)


def test_closing_a_client_ends_its_calls() -> None:
    """Those that wait for an answer and those that wait for a connection; none looks as if it were cancelled."""

    async def test() -> None:
        async with served() as (context, _, bound):
            async with connected(context, bound) as client:
                call = asyncio.create_task(client.call(Ask("sleep", 60_000), 60))
                await asyncio.sleep(0.05)
            with pytest.raises(PeerDied, match="closed"):
                await call
            with pytest.raises(PeerDied, match="closed"):
                await client.call(Ask("x"), 60)
            async with connected(context, "tcp://127.0.0.1:1") as client:
                call = asyncio.create_task(client.call(Ask("x"), 60))
                given_up = asyncio.create_task(client.call(Ask("x"), 60))
                await asyncio.sleep(0.05)
                given_up.cancel()
            with pytest.raises(PeerDied, match="closed"):
                await call
            with pytest.raises(asyncio.CancelledError):
                await given_up

    in_both_loops(test)


def test_a_caller_that_gives_up_leaves_nothing() -> None:
    async def test() -> None:
        async with served() as (context, _, bound), connected(context, bound) as client:
            call = asyncio.create_task(client.call(Ask("sleep", 100), 60))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert client._calls == {}
            await asyncio.sleep(0.1)
            assert await client.call(Ask("x"), 5) == Answer("x", 0)

    in_both_loops(test)


JUNK = [
    [],
    [b""],
    [b"1234567", msgspec.msgpack.encode(Ask("x"))],
    [b"12345678"],
    [b"12345678", b"x", b"y"],
    [b"12345678", b"\xc1"],
    [b"12345678", msgspec.msgpack.encode({"type": "Other"})],
    [b"12345678", b"\x91" * 100_000],
]


def test_junk_is_counted_and_harms_nobody() -> None:
    """Each kind once; where the call number is readable, the sender learns of it. A good client works on."""

    async def test() -> None:
        async with served() as (context, server, bound), connected(context, bound) as client:
            raw = context.socket(zmq.DEALER, socket_class=zmq.asyncio.Socket)
            raw.connect(bound)
            for frames in JUNK:
                await raw.send_multipart(frames or [b"", b"", b"", b""])
            for _ in range(3):
                number, body = await asyncio.wait_for(raw.recv_multipart(), 20)
                reply = msgspec.msgpack.decode(body, type=Reply)
                assert number == b"12345678" and isinstance(reply, Failed) and reply.code == "wire"
            assert server.dropped_frames == len(JUNK)
            assert await client.call(Ask("x"), 5) == Answer("x", 0)
            raw.close(linger=0)

    in_both_loops(test)


def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "MAX_FRAME_NBYTES", 1000)

    async def test() -> None:
        async with (
            served() as (context, _, bound),
            connected(context, bound) as good,
            connected(context, bound) as bad,
        ):
            assert await bad.call(Ask("x" * 900), 5) == Answer("x" * 900, 0)
            with pytest.raises(PeerDied):
                await bad.call(Ask("x" * 1001), 5)
            assert await good.call(Ask("x"), 5) == Answer("x", 0)
            assert await bad.call(Ask("x"), 5) == Answer("x", 0)  # connected again

    in_both_loops(test)


def test_replies_that_are_none_are_counted_by_the_client() -> None:
    """A ROUTER by hand that answers with junk first, then properly."""

    async def test() -> None:
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER, socket_class=zmq.asyncio.Socket)
        router.bind("tcp://127.0.0.1:0")
        async with connected(context, router.getsockopt_string(zmq.LAST_ENDPOINT)) as client:
            call = asyncio.create_task(client.call(Ask("x"), 5))
            peer, number, _ = await router.recv_multipart()
            good = msgspec.msgpack.encode(Answer("x", 1))
            for frames in ([b"1"], [number, good, b""], [number, b"\xc1"], [b"87654321", good], [number, good]):
                await router.send_multipart([peer, *frames])
            assert await call == Answer("x", 1)
            assert client.dropped_frames == 3
        router.close(linger=0)
        context.term()

    in_both_loops(test)


@asynccontextmanager
async def answered_by_hand() -> AsyncIterator[tuple[zmq.asyncio.Socket, Client]]:
    """A client whose server is a bare ROUTER, which may answer what it likes."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER, socket_class=zmq.asyncio.Socket)
    router.bind("tcp://127.0.0.1:0")
    try:
        async with connected(context, router.getsockopt_string(zmq.LAST_ENDPOINT)) as client:
            yield router, client
    finally:
        router.close(linger=0)
        context.term()


NO_REPLY = [
    b"",
    b"\x91" * 100_000,
    pickle.dumps(Answer("x", 1)),
    msgspec.msgpack.encode(Ask("x")),
    b"\xdf\xff\xff\xff\xff",
]


def test_no_reply_of_a_hostile_server_ends_more_than_its_call() -> None:
    """Each kind once, of which the client counts those that are none; then twice the final one, then the next call."""

    async def test() -> None:
        async with answered_by_hand() as (router, client):
            for i in range(2):
                call = asyncio.create_task(client.call(Ask("x"), 5))
                peer, number, _ = await router.recv_multipart()
                for frame in NO_REPLY:
                    await router.send_multipart([peer, number, frame])
                for _ in range(2):
                    await router.send_multipart([peer, number, msgspec.msgpack.encode(Answer("x", i))])
                assert await call == Answer("x", i)
                assert client.dropped_frames == len(NO_REPLY) * (i + 1)

    in_both_loops(test)


@pytest.mark.parametrize("listener", ["of replies", "of the connection's end"])
def test_calls_end_at_once_if_a_listener_of_the_client_fails(
    listener: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that are out and those that follow; the log says where it failed."""

    def fail(_: object) -> None:
        raise ZeroDivisionError("a bug")

    def fail_at_the_end(frames: list[bytes]) -> Any:
        event = parse_monitor_message(frames)
        return event if event["event"] != zmq.EVENT_DISCONNECTED else fail(event)

    if listener == "of the connection's end":
        monkeypatch.setattr(rpc_client, "parse_monitor_message", fail_at_the_end)

    async def test() -> None:
        async with answered_by_hand() as (router, client):
            calls = [asyncio.create_task(client.call(Ask("x"), 60)) for _ in range(2)]
            peer, number, _ = await router.recv_multipart()
            if listener == "of replies":
                monkeypatch.setattr(client._codec, "decode", fail)
                await router.send_multipart([peer, number, b""])
            else:
                router.close(linger=0)
            for call in [*calls, client.call(Ask("x"), 60)]:
                with pytest.raises(PeerError, match=r"server at .* cannot be read any more: ZeroDivisionError; "):
                    await asyncio.wait_for(call, 20)
            assert not client.lost.is_set() and client._calls == {}

    in_both_loops(test)
    assert " fail" in caplog.text


def test_a_server_serves_until_its_end_and_raises_what_ends_it() -> None:
    """The first of the two; a cancelled one leaves an end that nobody waits for."""

    async def test() -> None:
        async with served() as (context, _, _):
            loop = asyncio.get_running_loop()
            for error in (None, PeerDied("the copy loop failed")):
                server, end = Server(context, Ask, handle, Failed), loop.create_future()
                async with connected(context, server.bind("tcp://127.0.0.1:0")) as client:
                    serving = asyncio.create_task(server.serve_until(end))
                    assert await client.call(Ask("x"), 5) == Answer("x", 0)
                    assert not serving.done()
                    end.set_exception(error) if error else end.set_result(None)
                    assert (await asyncio.gather(serving, return_exceptions=True))[0] is error
                await server.close()
            deaf, cancelled = loop.create_future(), loop.create_future()
            server = Server(context, Ask, handle, Failed)
            serving = asyncio.create_task(server.serve_until(cancelled))
            await asyncio.sleep(0)
            serving.cancel()
            await asyncio.wait({serving})
            assert serving.cancelled() and cancelled.cancelled()
            await server.close()
            with pytest.raises(zmq.ZMQError):
                await asyncio.wait_for(server.serve_until(deaf), 20)  # its socket is closed
            assert deaf.cancelled()

    in_both_loops(test)


def test_an_oversized_reply_ends_the_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever watches the connection learns that it closed."""
    monkeypatch.setattr(rpc_client, "MAX_FRAME_NBYTES", 1000)

    async def test() -> None:
        async with answered_by_hand() as (router, client):
            calls = [asyncio.create_task(client.call(Ask("x"), 60)) for _ in range(2)]
            peer, number, _ = await router.recv_multipart()
            await router.send_multipart([peer, number, bytes(1001)])
            for call in calls:
                with pytest.raises(PeerDied):
                    await asyncio.wait_for(call, 20)
            assert client.lost.is_set()

    in_both_loops(test)


@pytest.mark.parametrize(
    "greeting",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64, bytes(10_000)],
    ids=["nothing", "http", "half a greeting", "zeros"],
)
def test_a_server_that_speaks_something_else_is_no_server(greeting: bytes) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    async def test() -> None:
        context = zmq.asyncio.Context()
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as other:
            port = other.sockets[0].getsockname()[1]
            async with connected(context, f"tcp://127.0.0.1:{port}") as client:
                with pytest.raises((PeerDied, PeerTimeout)):
                    await client.call(Ask("x"), 0.3)
                assert client._calls == {}
        context.term()

    in_both_loops(test)


def test_connections_come_and_go_and_leave_nothing() -> None:
    """A hundred, each closed with a call in flight. Against the tasks and descriptors after the first few."""

    async def test() -> None:
        async with served() as (context, server, bound):
            counts = []
            for _ in range(100):
                client = Client(context, bound, Reply, (Answer, Failed), Failed, "server")
                call = asyncio.create_task(client.call(Ask("sleep", 600_000), 600))
                await client.call(Ask("x"), 5)  # so that the one before has arrived too
                await client.close()
                with pytest.raises(PeerDied, match="closed"):
                    await call
                for task in server._tasks:
                    task.cancel()
                await asyncio.gather(*server._tasks, return_exceptions=True)
                counts.append((len(asyncio.all_tasks()), descriptors()))
            assert counts[-1][0] == counts[5][0]
            assert counts[-1][1] <= counts[5][1] + 3  # those of connections that ZeroMQ is still closing

    in_both_loops(test)


def descriptors() -> int:
    """Open files and sockets of this process."""
    process = psutil.Process()
    return int(process.num_handles() if sys.platform == "win32" else process.num_fds())


def test_a_client_that_is_gone_or_reads_nothing_costs_only_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress to it raises PeerDied: at once when it left, after the queue is full when it does not read."""
    monkeypatch.setattr(rpc_server, "SEND_QUEUE_REPLIES", 10)

    async def test() -> None:
        ended: asyncio.Queue[str] = asyncio.Queue()

        async def flood(call: Call[Ask, Reply]) -> Reply:
            if call.request.what == "x":
                return Answer("x", 0)
            try:
                while True:
                    await call.progress(Answer("y" * 100_000, 0))
                    await asyncio.sleep(0)
            except PeerDied as error:
                ended.put_nowait(str(error))
                raise

        async with served(handler=flood) as (context, server, bound), connected(context, bound) as good:
            for close_first in (True, False):
                raw = context.socket(zmq.DEALER, socket_class=zmq.asyncio.Socket)
                raw.setsockopt(zmq.RCVHWM, 1)
                raw.connect(bound)
                await raw.send_multipart([b"12345678", msgspec.msgpack.encode(Ask("flood"))])
                if close_first:
                    await raw.recv_multipart()
                    raw.close(linger=0)
                why = await asyncio.wait_for(ended.get(), 20)
                assert close_first or "does not read" in why
                assert await good.call(Ask("x"), 5) == Answer("x", 0)
                raw.close(linger=0)
            async with asyncio.timeout(20):
                while server._tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    in_both_loops(test)


@pytest.mark.parametrize("patience_s", [30.0, 0.3])
def test_a_client_that_reads_again_finds_the_end_of_each_request(
    monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """Of one that flooded it and of a short one beside it; but not if it has read nothing for too long."""
    monkeypatch.setattr(rpc_server, "SEND_QUEUE_REPLIES", 10)
    monkeypatch.setattr(rpc_server, "FINAL_PATIENCE_S", patience_s)

    async def test() -> None:
        full, short = asyncio.Event(), asyncio.Event()

        async def flood(call: Call[Ask, Reply]) -> Reply:
            if call.request.what == "short":
                short.set()
                return Answer("short", 0)
            refused = 0
            while refused < 20:  # at first there is still room below: the system's buffers take some
                try:
                    await call.progress(Answer("y" * 100_000, 0))
                    refused = 0
                except PeerDied:
                    refused += 1
                    await asyncio.sleep(0.01)
            full.set()
            return Answer("the end", 0)

        async with served(handler=flood) as (context, server, bound):
            raw = context.socket(zmq.DEALER, socket_class=zmq.asyncio.Socket)
            raw.setsockopt(zmq.RCVHWM, 1)
            raw.connect(bound)
            await raw.send_multipart([b"12345678", msgspec.msgpack.encode(Ask("flood"))])
            await asyncio.wait_for(full.wait(), 20)
            await raw.send_multipart([b"87654321", msgspec.msgpack.encode(Ask("short"))])
            await until(lambda: short.is_set() and len(server._tasks) == (2 if patience_s > 1 else 0))
            await asyncio.sleep(0.3)
            assert len(server._tasks) == (2 if patience_s > 1 else 0)
            ends = set[str]()
            with contextlib.suppress(TimeoutError):
                while len(ends) < 2:
                    _, body = await asyncio.wait_for(raw.recv_multipart(), 10 if patience_s > 1 else 1)
                    answer = msgspec.msgpack.decode(body, type=Answer)
                    ends |= {answer.what} - {"y" * 100_000}
            assert ends == ({"the end", "short"} if patience_s > 1 else set())
            raw.close(linger=0)

    in_both_loops(test)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:0", "tcp://*:0", "ipc:///x", "tcp://10.0.0.1:0", "tcp://127.0.0.1", "tcp://127.0.0.1.evil:0", ""],
)
def test_only_loopback_is_served(endpoint: str) -> None:
    async def test() -> None:
        async with served() as (context, _, _):
            other = Server(context, Ask, handle, Failed)
            with pytest.raises(ConfigError, match="loopback"):
                other.bind(endpoint)
            await other.close()

    run(test(), "selector")


def test_a_taken_port_is_a_config_error_that_names_it() -> None:
    async def test() -> None:
        async with served() as (context, _, bound):
            other = Server(context, Ask, handle, Failed)
            with pytest.raises(ConfigError, match=bound):
                other.bind(bound)
            await other.close()

    in_both_loops(test)


def test_a_request_that_a_send_was_the_first_to_notice_is_answered() -> None:
    """It arrives while the loop is busy, and the send after that takes note of it in the loop's place."""

    async def block(call: Call[Ask, Reply]) -> Reply:
        await asyncio.sleep(0.02)
        time.sleep(0.04)  # noqa: ASYNC251 - nothing but the send below may look at the socket
        call.send(Part(call.request.number))
        return Answer(call.request.what, call.request.number)

    def ask_in_turn(bound: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.setsockopt(zmq.RCVTIMEO, 5000)
            raw.connect(bound)
            for number in range(6):
                raw.send_multipart([bytes(8), msgspec.msgpack.encode(Ask("block", number))])
                if number % 2:  # the one before is still being served
                    for _ in range(4):
                        raw.recv_multipart()
                else:
                    time.sleep(0.04)

    async def test() -> None:
        async with served(handler=block) as (_, _, bound):
            await asyncio.to_thread(ask_in_turn, bound)

    in_both_loops(test)


def test_a_request_that_a_failing_send_was_the_first_to_notice_is_answered() -> None:
    """The same where the client that is sent to has left, as one that ends while its progress is told."""
    left, asked = threading.Event(), threading.Event()

    async def block(call: Call[Ask, Reply]) -> Reply:
        while call.request.what == "leave":
            try:
                call.send(Part(0))
            except PeerDied:
                left.set()
                assert asked.wait(5)
                time.sleep(0.04)  # noqa: ASYNC251 - nothing but the send of the final reply may look at the socket
                break
            await asyncio.sleep(0.01)
        return Answer("", 0)

    def ask_when_one_has_left(bound: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
            raw.setsockopt(zmq.RCVTIMEO, 5000)
            raw.connect(bound)
            with context.socket(zmq.DEALER) as leaver:
                leaver.connect(bound)
                leaver.send_multipart([bytes(8), msgspec.msgpack.encode(Ask("leave"))])
                leaver.recv_multipart()
            raw.send_multipart([bytes(8), msgspec.msgpack.encode(Ask("before"))])
            raw.recv_multipart()
            assert left.wait(5)
            raw.send_multipart([bytes(8), msgspec.msgpack.encode(Ask("after"))])
            asked.set()
            raw.recv_multipart()

    async def test() -> None:
        left.clear()
        asked.clear()
        async with served(handler=block) as (_, _, bound):
            await asyncio.to_thread(ask_when_one_has_left, bound)

    in_both_loops(test)


FULL = """
import asyncio, resource, sys
import msgspec, zmq.asyncio
from copyengine.protocol import Done, Failed, Stats
from copyengine.wire.rpc_server import RpcServer

async def main():
    server = RpcServer(zmq.asyncio.Context(), Stats, answer, Failed)
    print(server.bind("tcp://127.0.0.1:0"), flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    await server.serve()

async def answer(call):
    return Done()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_a_server_that_may_open_no_more_sockets_serves_again_when_it_may() -> None:
    """Against more peers than it has descriptors, who say nothing; who is connected is served all the while."""
    with subprocess.Popen([sys.executable, "-c", FULL], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = process.stdout.readline().strip()
            address = ("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
            with zmq.Context() as context, context.socket(zmq.DEALER) as early, context.socket(zmq.DEALER) as late:
                for peer in (early, late):
                    peer.linger, peer.rcvtimeo = 0, 20_000
                early.connect(endpoint)
                answered(early)
                silent = [socket.create_connection(address, timeout=20) for _ in range(60)]
                answered(early)
                for one in silent:
                    one.close()
                late.connect(endpoint)
                answered(late)
            assert process.poll() is None
        finally:
            process.kill()


def answered(peer: "zmq.Socket[bytes]") -> None:
    peer.send_multipart([b"12345678", msgspec.msgpack.encode({"type": "Stats"})])
    assert msgspec.msgpack.decode(peer.recv_multipart()[1]) == {"type": "Done"}
