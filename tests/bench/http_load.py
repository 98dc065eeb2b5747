"""The load of offered_load.py over HTTP: streamed completions, read by a client that costs next to nothing."""

import asyncio
import json
import random
import time
from typing import Any

from tests.bench.offered_load import Load, Served

ANSWER_S = 300.0
END = b"0\r\n\r\n"
"""What a chunked body ends with."""

EVENT = b"data: "


async def offer_http(port: int, load: Load, seed: int = 0) -> Served:
    """Ask, and wait for all; `pieces` are the events with tokens. AssertionError for an answer that is none."""
    served = Served(load)
    loop = asyncio.get_running_loop()
    streams = [(await loop.create_connection(EventReader, "127.0.0.1", port))[1] for _ in range(load.clients)]
    try:
        start_s = time.perf_counter()
        await asyncio.gather(*(_converse(stream, load, seed + i, served) for i, stream in enumerate(streams)))
        served.wall_s = time.perf_counter() - start_s
    finally:
        for stream in streams:
            stream.close()
    return served


def body_of(draw: random.Random, load: Load, seed: int) -> dict[str, Any]:
    """A request for what offered_load's clients ask."""
    ids = [draw.randrange(3, load.vocab_size) for _ in range(load.prompt_tokens)]
    return {
        "prompt": ids,
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": load.new_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _converse(stream: "EventReader", load: Load, seed: int, served: Served) -> None:
    draw = random.Random(seed)
    for _ in range(load.answers):
        body = json.dumps(body_of(draw, load, seed)).encode()
        start_s = time.perf_counter()
        async with asyncio.timeout(ANSWER_S):
            await stream.ask(body)
        assert stream.told(load.new_tokens), stream.tail.decode(errors="replace")
        served.ttft_s.append(stream.first_s - start_s)
        if load.new_tokens > 1:
            served.tpot_s.append((stream.last_s - stream.first_s) / (load.new_tokens - 1))
        served.pieces += stream.events - 3  # the reason, the usage and [DONE] bring no token


class EventReader(asyncio.Protocol):
    """One connection. It counts events, and keeps only the end of an answer."""

    def __init__(self) -> None:
        self.events = 0
        self.first_s = self.last_s = 0.0
        self.tail = b""
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It may be asked."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def ask(self, body: bytes) -> None:
        """Send a request and read its whole answer. ConnectionError if the connection ends first."""
        self.events, self.first_s, self.tail = 0, 0.0, b""
        self._done = asyncio.get_running_loop().create_future()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        self._transport.write(head.encode() + b"\r\n\r\n" + body)
        await self._done

    def data_received(self, data: bytes) -> None:
        """Count the events in it, also one that is cut in two."""
        self.last_s = time.perf_counter()
        self.events += (self.tail[1 - len(EVENT) :] + data).count(EVENT)
        if self.events and not self.first_s:
            self.first_s = self.last_s
        self.tail = (self.tail + data)[-1024:]
        if self.tail.endswith(END) and self._done and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits learns it."""
        if self._done and not self._done.done():
            self._done.set_exception(ConnectionError(f"the connection ended: {exc}"))

    def told(self, new_tokens: int) -> bool:
        """Whether the answer ended well, with so many tokens."""
        return b"data: [DONE]" in self.tail and b'"completion_tokens":%d,' % new_tokens in self.tail

    def close(self) -> None:
        """End the connection."""
        self._transport.close()
