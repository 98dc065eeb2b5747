"""Frames that nobody should send, to every socket of a running engine: counted, dropped, and the next request answered.

Checked against the engine's own counters, its processes and their memory, and against what a good client gets.
"""

import asyncio
import pickle
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

import copyengine.protocol as copies
import scheduler.protocol as serving
import worker.protocol as steps
from copyengine.client import CopyEngineClient
from copyengine.wire.codec import MAX_FRAME_NBYTES
from scheduler.client import Client
from scheduler.protocol import Health, HealthReply, Sampling
from tests.e2e.engine import Engine
from worker.client import WorkerClient

PROCESSES = ("scheduler", "worker", "copyengine")
NUMBER = b"12345678"
encode = msgspec.msgpack.encode
STATS = encode(serving.Stats())

WRONG_DIRECTION = {
    "scheduler": serving.Accepted("r", 1),
    "worker": steps.LoadProgress("experts", 1, 2),
    "copyengine": copies.Attached(),
}
ANOTHER_PROCESS = {
    "scheduler": copies.Wake("worker0"),
    "worker": serving.Generate("x"),
    "copyengine": steps.Release([1]),
}
WRONG_TYPE = {
    "scheduler": {"type": "Generate", "prompt": 7},
    "worker": {"type": "RunStep", "mode": "decode", "sequences": []},
    "copyengine": {"type": "Detach", "worker": None},
}


def frames_without_a_number() -> list[list[bytes]]:
    """Those whose sender cannot be told: too few or too many parts, or a call number that is none."""
    parts = [[b""], [STATS], [b"", STATS], [NUMBER, STATS, b""], [NUMBER, STATS, b"x", b"y", b"z"], [b""] * 50]
    return [*parts, [NUMBER[:7], STATS], [NUMBER + b"9", STATS], [STATS, NUMBER]]


def frames_with_a_number(process: str) -> list[bytes]:
    """Messages that are none of `process`'s requests."""
    return [
        b"",
        b"\xc1",
        STATS[:-1],
        STATS + b"\x00",
        bytes(range(256)),
        pickle.dumps(serving.Stats()),
        b'{"type":"Stats"}',
        encode(None),
        encode({"type": 5}),
        encode({"type": "\ufffe" * 1000}),
        b"\x91" * 100_000,
        b"\x82\xa4type\xa5Stats\xa1x\xdd\xff\xff\xff\xff",  # announces four thousand million elements
        encode(WRONG_DIRECTION[process]),
        encode(ANOTHER_PROCESS[process]),
        encode(WRONG_TYPE[process]),
        b"\xc1" * MAX_FRAME_NBYTES,
    ]


def flag_of(process: psutil.Process, name: str) -> str:
    """What it was started with as `--name`."""
    argv: list[str] = process.cmdline()
    return next(text.split("=", 1)[1] for text in argv if text.startswith(f"--{name}="))


def processes(engine: Engine) -> dict[str, psutil.Process]:
    """The engine's processes that listen."""
    return {module: child for child in engine.children() for module in PROCESSES if module in child.cmdline()}


def endpoints(engine: Engine) -> dict[str, str]:
    """Where each listens, by the command line of the one that calls it."""
    running = processes(engine)
    return {
        "scheduler": engine.endpoint,
        "worker": flag_of(running["scheduler"], "workers"),
        "copyengine": flag_of(running["worker"], "copy-engine"),
    }


async def dropped(endpoint: str, process: str) -> int:
    """What `process` says it has dropped; a good request that it answers."""
    if process == "scheduler":
        async with Client(endpoint) as client:
            return (await client.stats()).dropped_frames
    context = zmq.asyncio.Context()
    other = (WorkerClient if process == "worker" else CopyEngineClient)(context, endpoint)
    try:
        return (await other.stats()).dropped_frames
    finally:
        await other.close()
        context.term()


@contextmanager
def dealer(endpoint: str, **options: Any) -> Iterator[zmq.Socket[bytes]]:
    """A peer that says what it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger, peer.rcvtimeo = 0, 20_000
        for name, value in options.items():
            setattr(peer, name, value)
        peer.connect(endpoint)
        yield peer


@pytest.fixture(params=PROCESSES)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def unharmed(engine: Engine) -> Iterator[None]:
    """After each test the same processes run, have not grown, and answer; a first answer takes memory of its own."""
    assert asyncio.run(answer(engine)) == 2
    before = {name: (child.pid, child.memory_info().rss) for name, child in processes(engine).items()}
    yield
    assert asyncio.run(answer(engine)) == 2
    for name, child in processes(engine).items():
        pid, nbytes = before[name]
        assert child.pid == pid, f"{name} was started anew"
        assert child.memory_info().rss < nbytes + 100 * 2**20, f"{name} has grown"


async def answer(engine: Engine) -> int:
    """How many tokens come when two are asked for."""
    async with Client(engine.endpoint) as client:
        question = client.generate(token_ids=[5, 6, 7], sampling=Sampling(max_tokens=2, ignore_eos=True))
        return len([token async for piece in question for token in piece.token_ids])


def test_junk_is_counted_and_its_sender_told_where_it_can_be(engine: Engine, target: str) -> None:
    endpoint = endpoints(engine)[target]
    before = asyncio.run(dropped(endpoint, target))
    silent, told = frames_without_a_number(), frames_with_a_number(target)
    with dealer(endpoint) as peer:
        for frames in silent:
            peer.send_multipart(frames)
        for body in told:
            peer.send_multipart([NUMBER, body])
            number, reply = peer.recv_multipart()
            failed = msgspec.msgpack.decode(reply, type=serving.Failed)
            assert (number, failed.code) == (NUMBER, "wire") and len(failed.detail) < 1000, body[:50]
    assert asyncio.run(dropped(endpoint, target)) == before + len(silent) + len(told)


def test_a_flood_of_junk_is_counted_to_the_last_frame(engine: Engine, target: str) -> None:
    """From a peer that reads nothing of what it is told."""
    endpoint = endpoints(engine)[target]
    before = asyncio.run(dropped(endpoint, target))
    with dealer(endpoint, rcvhwm=1, sndhwm=0) as peer:
        for _ in range(3000):
            peer.send_multipart([NUMBER, b"\xc1"])
        peer.send_multipart([b""])
        deadline_s = time.monotonic() + 30
        while (count := asyncio.run(dropped(endpoint, target)) - before) < 3001:
            assert time.monotonic() < deadline_s, f"{count} were counted"
    assert count == 3001


def test_what_is_far_too_long_is_cut_off_and_the_sender_may_come_again(engine: Engine, target: str) -> None:
    """300 MB for real: the connection ends at its head, and the same socket, connected anew, is answered."""
    with dealer(endpoints(engine)[target]) as peer:
        watch = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        watch.rcvtimeo = 20_000
        peer.send_multipart([NUMBER, bytes(300 * 2**20)], copy=False)
        with watch:
            watch.recv_multipart()  # or zmq.Again
            peer.disable_monitor()
        peer.send_multipart([b"87654321", STATS])
        number, reply = peer.recv_multipart()
        assert number == b"87654321" and msgspec.msgpack.decode(reply)["type"] == "StatsReply"


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready(kind: bytes = b"DEALER") -> bytes:
    """ZMTP's handshake of a socket of that kind (RFC 23)."""
    properties = b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    body = b"\x05READY" + properties
    return b"\x04" + bytes([len(body)]) + body


BYTES = {
    "tls": bytes.fromhex("16030100a5010000a10303") + bytes(154),
    "noise": bytes(range(256)) * 40,
    "half a greeting and another mechanism": GREETING[:12] + b"PLAIN".ljust(52, b"\0"),
    "a socket that does not belong here": GREETING + ready(b"PUB"),
    "a message of 2^63 bytes": GREETING + ready() + b"\x02" + struct.pack(">Q", 2**63),
    "a message of 300 MB that ends early": GREETING + ready() + b"\x02" + struct.pack(">Q", 300_000_000) + bytes(1000),
    "an identity of 2^31 bytes": GREETING + b"\x04\x1d\x05READY\x08Identity" + struct.pack(">I", 2**31) + bytes(10),
}
"""What ZeroMQ itself has to see through, without any of it reaching our code."""


def test_bytes_that_are_no_zeromq_end_their_connection(engine: Engine, target: str) -> None:
    """Beside two that stay, at their own cost: one says nothing, one what an old ZeroMQ might begin with (RFC 13)."""
    endpoint = endpoints(engine)[target]
    address = ("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
    before = asyncio.run(dropped(endpoint, target))
    with socket.create_connection(address), socket.create_connection(address) as http:
        http.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for sent in BYTES.values():
            with socket.create_connection(address) as raw:
                raw.settimeout(20)
                raw.sendall(sent)
                with suppress(ConnectionResetError):
                    while raw.recv(65536):  # TimeoutError unless the other side hangs up
                        pass
        reached = asyncio.run(dropped(endpoint, target)) - before
    assert reached == 0


def test_odd_peers_are_answered_as_any_other(engine: Engine, target: str) -> None:
    """One that uses its call number twice has a final reply for each, as has one that names itself, however it does."""
    for identity in (b"", b"\x01", b"\xff" * 8, b"x" * 255):
        with dealer(endpoints(engine)[target], **({"identity": identity} if identity else {})) as peer:
            for _ in range(2):
                peer.send_multipart([NUMBER, STATS])
            for _ in range(2):
                number, reply = peer.recv_multipart()
                assert (number, msgspec.msgpack.decode(reply)["type"]) == (NUMBER, "StatsReply")


def test_a_stolen_identity_gets_nothing(engine: Engine) -> None:
    """The first to have it keeps it: neither its answers nor its requests are the other's to take or to abort."""
    ask = encode(serving.Generate(prompt="x", sampling=Sampling(max_tokens=20, ignore_eos=True), request_id="mine"))
    with dealer(engine.endpoint, identity=b"same") as first:
        first.send_multipart([NUMBER, ask])
        accepted = msgspec.msgpack.decode(first.recv_multipart()[1], type=serving.Reply)
        assert isinstance(accepted, serving.Accepted)
        with dealer(engine.endpoint, identity=b"same", rcvtimeo=500) as second:
            second.send_multipart([NUMBER, encode(serving.Abort("mine"))])
            with pytest.raises(zmq.Again):
                second.recv_multipart()
        reply: serving.Reply = accepted
        while not isinstance(reply, serving.Finished):
            reply = msgspec.msgpack.decode(first.recv_multipart()[1], type=serving.Reply)
            assert isinstance(reply, serving.Tokens | serving.Finished)
    assert reply.reason == "length"


def test_nothing_listens_beyond_loopback(engine: Engine) -> None:
    """Against the system's own list: four ports, which the command lines and the Ready block name, and no Unix socket
    with a name."""
    everybody = [psutil.Process(engine.process.pid), *engine.children()]
    found = [connection for process in everybody for connection in process.net_connections("inet")]
    listening = {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN or not c.raddr}
    named = [*endpoints(engine).values(), engine.fact("HTTP").removesuffix("/v1")]
    stated = [re.fullmatch(r"(?:tcp|http)://(127\.0\.0\.1):(\d+)", one) for one in named]
    assert listening == {(match[1], int(match[2])) for match in stated if match}
    assert all(c.laddr.ip == c.raddr.ip == "127.0.0.1" for c in found if c.raddr)
    assert not [c for process in everybody for c in process.net_connections("unix") if c.laddr]


def test_health_is_answered_while_junk_comes(engine: Engine) -> None:
    with dealer(engine.endpoint, sndhwm=0) as peer:
        for _ in range(500):
            peer.send_multipart([NUMBER, b"\xc1"])
        peer.send_multipart([b"87654321", encode(Health())])
        replies = [peer.recv_multipart() for _ in range(501)]
    assert {number for number, _ in replies[:-1]} == {NUMBER}
    assert isinstance(msgspec.msgpack.decode(replies[-1][1], type=serving.Reply), HealthReply)
