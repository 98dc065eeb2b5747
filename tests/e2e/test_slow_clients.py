"""Clients that do not read their long answers, beside one that does: real processes, a model that takes no time.

Checked against the limits that are named, the memory of the processes, and how fast the other client's tokens come.
"""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import psutil
import pytest
import zmq

from copyengine.wire.codec import Codec
from scheduler.client import Client
from scheduler.protocol import Failed, Generate, Reply, StatsReply
from tests.bench.front_alone import MODEL, Rig, rig
from tests.e2e.crowd import LOOPS, sampling
from tests.e2e.engine import ROOT, own_nbytes
from tests.e2e.windows import CONDITIONS

ANSWER_TOKENS = 100_000
MODEL_LENGTH = 130_000
CLIENTS = 2
"""Of each kind that do not read."""

MOST_TOKENS = 30_000
"""Sent to one of them at most: 1,000 replies over ZMQ or 8,192 tokens over HTTP wait, and the system holds some."""

READ_TOKENS = 1500
"""Of an answer beside them that is read."""

ENDED_S = 60.0
"""Within which each of them has to be ended: by what waits for it, or over HTTP after 30 s without a byte written."""

MORE_NBYTES = 48 * 2**20
"""That scheduler and front may take more. Held are, for each client, at most 1,000 replies of some 100 bytes or 8,192
tokens, and 64 KiB; the answers whole would be 6 x 100,000 tokens with some 300 bytes each."""

SLOWER = 6.0
"""Times that the other client's tokens may take while the slow ones are served beside it, and have theirs made."""

TRIES = 3


@pytest.fixture(scope="module", params=LOOPS)
def alone(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "uvloop":
            pytest.importorskip("uvloop")
        else:
            for name, value in CONDITIONS.items():
                patch.setenv(name, value)
        event_loop = "selector" if request.param == "windows" else "uvloop"
        with rig(0.0, max_model_len=MODEL_LENGTH, event_loop=event_loop) as started:
            yield started


def stats_of(alone: Rig) -> StatsReply:
    async def ask() -> StatsReply:
        async with Client(alone.endpoint) as client:
            return await client.stats()

    return asyncio.run(ask())


def token_s(alone: Rig, tokens: int = READ_TOKENS) -> float:
    """Seconds a token of one that reads, the quickest of some tries."""

    async def ask() -> float:
        async with Client(alone.endpoint) as client:
            best = float("inf")
            for _ in range(TRIES):
                start_s = time.monotonic()
                got = [t async for p in client.generate(token_ids=[5], sampling=sampling(tokens)) for t in p.token_ids]
                assert len(got) == tokens
                best = min(best, time.monotonic() - start_s)
            return best / tokens

    return asyncio.run(ask())


@contextmanager
def never_read(alone: Rig) -> Iterator[Callable[[], str]]:
    """A socket that asks, and of which nothing is received until in the end; how the answer ends then."""
    requests, replies, context = Codec[Generate](Generate), Codec[Reply](Reply), zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 10)
        dealer.connect(alone.endpoint)
        asked = Generate(token_ids=[7], sampling=sampling(ANSWER_TOKENS))
        dealer.send_multipart([b"%08d" % 1, requests.encode(asked)])

        def end() -> str:
            while dealer.poll(10_000):
                reply = replies.decode(dealer.recv_multipart()[1])
                if isinstance(reply, Failed):
                    return reply.code
            return "nothing"

        yield end
    context.term()


@contextmanager
def stopped_process(alone: Rig) -> Iterator[Callable[[], str]]:
    """The client command, stopped by SIGSTOP in its answer and in the end continued; what it says of the end."""
    command = [
        sys.executable,
        "-m",
        "scheduler.client",
        "--endpoint",
        alone.endpoint,
        "--max-tokens",
        str(ANSWER_TOKENS),
    ]
    with subprocess.Popen(
        [*command, "--ignore-eos", "words"],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout and process.stdout.read(1)
            process.send_signal(signal.SIGSTOP)

            def end() -> str:
                process.send_signal(signal.SIGCONT)
                return process.communicate(timeout=30)[1].decode()

            yield end
        finally:
            process.kill()


@contextmanager
def unread_stream(alone: Rig) -> Iterator[Callable[[], str]]:
    """An HTTP connection of which nothing is read until in the end: whether it was cut off."""
    body = {"model": MODEL, "prompt": [7], "max_tokens": ANSWER_TOKENS, "stream": True, "ignore_eos": True}
    content = msgspec.json.encode(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", alone.port))
        connection.sendall(f"{head}{len(content)}\r\n\r\n".encode() + content)

        def end() -> str:
            connection.settimeout(30)
            got = b""
            try:
                while part := connection.recv(1 << 20):
                    got = got[-100:] + part
            except ConnectionResetError:
                return "cut off"
            return "whole" if b"[DONE]" in got else "cut off"

        yield end


def processes(alone: Rig) -> list[psutil.Process]:
    """The front, and the scheduler: who listens at its endpoint."""
    port = int(alone.endpoint.rpartition(":")[2])
    siblings = psutil.Process().children(recursive=True)
    listening = [p for p in siblings if any(c.laddr.port == port and c.status == "LISTEN" for c in p.net_connections())]
    assert len(listening) == 1
    return [alone.front, *listening]


@pytest.mark.timeout(300)
def test_who_does_not_read_is_ended_at_a_bound_and_holds_nobody_up(alone: Rig) -> None:
    """Answers of 100,000 tokens: over ZMQ to a socket that is never read and to a process that is stopped, and over
    HTTP as a stream. They end with a reason, which the first two are told when they read again."""
    quick_s = token_s(alone)
    before, held = stats_of(alone), [own_nbytes(p) for p in processes(alone)]
    most = list(held)

    def wait(met: Callable[[StatsReply], bool]) -> StatsReply:
        end_s = time.monotonic() + ENDED_S
        while not met(now := stats_of(alone)):
            assert time.monotonic() < end_s, now
            most[:] = [max(a, own_nbytes(p)) for a, p in zip(most, processes(alone), strict=True)]
            time.sleep(0.1)
        return now

    with ExitStack() as stack:
        never, stopped, unread = (
            [stack.enter_context(kind(alone)) for _ in range(CLIENTS)]
            for kind in (never_read, stopped_process, unread_stream)
        )
        beside_s = token_s(alone)
        wait(lambda now: now.failed - before.failed == 2 * CLIENTS)
        assert [end() for end in never] == ["too_slow"] * CLIENTS
        said = [end() for end in stopped]
        assert all("does not read" in text and "Traceback" not in text for text in said), said
        now = wait(lambda now: now.running == 0)
        assert [end() for end in unread] == ["cut off"] * CLIENTS
    assert (now.failed - before.failed, now.aborted - before.aborted) == (2 * CLIENTS, CLIENTS)
    sent = now.generated_tokens - before.generated_tokens
    assert sent < 3 * CLIENTS * MOST_TOKENS + TRIES * READ_TOKENS
    assert beside_s < SLOWER * quick_s, (beside_s, quick_s)
    grown = [a - b for a, b in zip(most, held, strict=True)]
    assert max(grown) < MORE_NBYTES, grown
