"""Greedy answers that are under way, by ZMQ and by HTTP, while something is done to the engine."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from copyengine.wire.errors import RequestRefused, SlotstreamError
from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.e2e.engine import Engine

ENDLESS = 4000
"""Tokens of an answer that takes far longer than a test."""

BEGIN_S = 60.0
"""Seconds in which the first token of each answer comes, on a machine that does much else."""

END_S = 2.0
"""Seconds within which a client hears of the end of its request after a process died or failed it."""

LOOK_S = 0.02
"""Seconds between two looks at the engine's health."""


def prompt(number: int, length: int = 30) -> list[int]:
    """Token ids of a prompt that begins like no other one."""
    return [300 + (7 * number + i) % 400 for i in range(length)]


class Stream:
    """One answer: what came of it so far, and how it ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pieces: list[Any] = []  # token ids by ZMQ, texts by HTTP
        self.begun = asyncio.Event()
        self.end = ""  # "length" if it came to its end, or the error's code, or the class of the client's exception
        self.why = ""
        self.ended_s = 0.0  # on the monotonic clock

    @property
    def answer(self) -> list[Any]:
        """What came, in one piece: by HTTP, pieces depend on when they were written."""
        return ["".join(self.pieces)] if self.pieces and isinstance(self.pieces[0], str) else self.pieces

    async def by_zmq(self, client: Client, max_tokens: int) -> None:
        """Ask over `client`."""
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        try:
            answer = client.generate(token_ids=prompt(self.number), sampling=sampling)
            async for piece in answer:
                self.pieces += piece.token_ids
                self.begun.set()
            assert answer.finished
            self._ended(answer.finished.reason, "")
        except SlotstreamError as error:
            self._ended(error.code if isinstance(error, RequestRefused) else type(error).__name__, str(error))

    async def by_http(self, http: httpx.AsyncClient, max_tokens: int) -> None:
        """Ask over `http`."""
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        try:
            async with http.stream(
                "POST", "/v1/completions", json={"prompt": prompt(self.number), **sampling}
            ) as reply:
                if reply.status_code != 200:
                    return self._refused(json.loads(await reply.aread()))
                async for line in reply.aiter_lines():
                    self._line(line)
        except httpx.TransportError as error:
            self._ended(type(error).__name__, str(error))

    def _line(self, line: str) -> None:
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            return
        said = json.loads(data)
        if "error" in said:
            return self._refused(said)
        for choice in said["choices"]:
            if choice["text"]:
                self.pieces.append(choice["text"])
                self.begun.set()
            if choice["finish_reason"]:
                self._ended(choice["finish_reason"], "")

    def _refused(self, said: dict[str, Any]) -> None:
        self._ended(said["error"]["code"], said["error"]["message"])

    def _ended(self, end: str, why: str) -> None:
        self.end, self.why, self.ended_s = end, why, time.monotonic()


class Streams:
    """Several answers, number i asked for prompt(i)."""

    def __init__(self, zmq: Sequence[Stream], http: Sequence[Stream], tasks: Sequence["asyncio.Task[None]"]) -> None:
        self.zmq, self.http = zmq, http
        self._tasks = tasks

    async def begin(self) -> None:
        """Wait until each has its first token."""
        async with asyncio.timeout(BEGIN_S):
            for stream in (*self.zmq, *self.http):
                await stream.begun.wait()

    async def over(self, timeout_s: float = 60.0) -> None:
        """Wait until all have ended."""
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks)


@asynccontextmanager
async def under_way(
    engine: Engine, client: Client, zmq: int = 8, http: int = 8, max_tokens: int = ENDLESS
) -> AsyncIterator[Streams]:
    """`zmq` and `http` answers, each with its first token; given up at the end if they still run."""
    by_zmq = [Stream(i) for i in range(zmq)]
    by_http = [Stream(i) for i in range(http)]
    async with httpx.AsyncClient(base_url=engine.url if http else "", timeout=60) as connection:
        asking: list[Awaitable[None]] = [stream.by_zmq(client, max_tokens) for stream in by_zmq]
        asking += [stream.by_http(connection, max_tokens) for stream in by_http]
        tasks = [asyncio.ensure_future(ask) for ask in asking]
        streams = Streams(by_zmq, by_http, tasks)
        try:
            await streams.begin()
            yield streams
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def answers(engine: Engine, client: Client, zmq: int, http: int, max_tokens: int) -> list[list[Any]]:
    """The whole answers, by ZMQ and then by HTTP."""
    async with under_way(engine, client, zmq, http, max_tokens) as streams:
        await streams.over()
    ended = [*streams.zmq, *streams.http]
    assert all(stream.end == "length" for stream in ended), [(stream.end, stream.why) for stream in ended]
    return [stream.answer for stream in ended]


async def until_health(engine: Engine, client: Client, ready: bool, timeout_s: float = 60.0) -> None:
    """Until both ZMQ's and HTTP's health say that it is ready, or both that it is not."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=10) as http, asyncio.timeout(timeout_s):
        by_zmq = by_http = not ready
        while by_zmq != ready or by_http != ready:
            if by_zmq != ready:
                by_zmq = await _ready(client)
            if by_http != ready:
                by_http = await _ready_by_http(http)
            await asyncio.sleep(LOOK_S)


async def _ready(client: Client) -> bool:
    try:
        return (await client.health()).ready
    except SlotstreamError:
        return False


async def _ready_by_http(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health/ready")).status_code == 200
    except httpx.TransportError:
        return False
