"""The HTTP front in this process, over a scheduler with made-up workers: real sockets, tokens by a rule."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from copyengine.checkpoint.directory import read_config
from scheduler.client import Client
from scheduler.http.app import App
from scheduler.http.config import HttpConfig
from scheduler.http.default_sampling import read_default_sampling
from scheduler.http.front import Front
from scheduler.http.listening import open_listener
from scheduler.http.routes import ROUTES
from scheduler.http.server import HttpServer
from scheduler.tokenize import load_text_codec
from tests.scheduler import rig

MODEL = "made-up"


class Connection:
    """A client that does what a polite one does not."""

    def __init__(self, port: int, receive_nbytes: int = 0) -> None:
        self.socket = socket.socket()
        if receive_nbytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_nbytes)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def post(self, path: str = "/v1/completions", /, **body: Any) -> None:
        content = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        await self.send(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    async def receive(self, nbytes: int = 65536) -> bytes:
        """What is there, at most `nbytes`; empty at the end. ConnectionResetError if it was cut off."""
        async with asyncio.timeout(20):
            return await asyncio.get_running_loop().sock_recv(self.socket, nbytes)

    async def until(self, text: bytes) -> bytes:
        """All that comes up to `text`, and what came with it."""
        got = b""
        while text not in got:
            part = await self.receive()
            assert part, got
            got += part
        return got

    async def rest(self) -> bytes:
        """All up to the end."""
        got = b""
        while part := await self.receive():
            got += part
        return got

    async def ends(self) -> None:
        """Wait until the server has ended it, whatever it still sends."""
        with contextlib.suppress(ConnectionError):
            await self.rest()

    def close(self, hard: bool = False) -> None:
        if hard:  # with a reset
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class HttpRig:
    """A front and the engine behind it."""

    def __init__(self, engine: rig.Rig, front: Front, server: HttpServer, port: int, http: httpx.AsyncClient) -> None:
        self.engine = engine
        self.front = front
        self.server = server
        self.port = port
        self.http = http
        self.vocab_size: int = engine.worker.facts.vocab_size

    async def post(self, path: str = "/v1/completions", /, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def events(self, path: str = "/v1/completions", /, **body: Any) -> list[Any]:
        """The data of each event of a stream, "[DONE]" as a text."""
        reply = await self.post(path, stream=True, **body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        *events, end = reply.text.split("\n\n")
        assert end == "" and all(one.startswith("data: ") for one in events)
        data = [one.removeprefix("data: ") for one in events]
        return [one if one == "[DONE]" else msgspec.json.decode(one) for one in data]

    async def at_rest(self) -> None:
        """Wait until nothing of any request is left, in the engine or here."""
        await self.engine.settled()
        async with asyncio.timeout(10):
            while self._busy():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await self.front.client.settle()
            while not self.engine.pages_free():  # noqa: ASYNC110 - those of a step that is out come back with it
                await asyncio.sleep(0.005)

    def _busy(self) -> bool:
        return bool(self.server.server_state.tasks or self.front._answering or not self.front._idle.is_set())

    async def there(self, count: int) -> None:
        """Wait until there are so many connections."""
        async with asyncio.timeout(10):
            while len(self.server.server_state.connections) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def gone(self, but: int = 0) -> None:
        """Wait until there are only so many connections. `http` keeps its own."""
        async with asyncio.timeout(10):
            while len(self.server.server_state.connections) > but:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    directory: Path, key: bytes = b"", engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[HttpRig]:
    """A front with `settings` over an engine with those of `engine`, at rest at the end."""
    async with rig.engine(directory, **(engine or {})) as started, Client(started.endpoint) as client:
        config = HttpConfig(scheduler=started.endpoint, model=str(directory), served_model_name=MODEL, **settings)
        text = load_text_codec(directory, read_config(directory))
        front = Front(config, client, text, MODEL, read_default_sampling(directory))
        server = HttpServer(App(front, ROUTES, key))
        with open_listener("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            running = asyncio.create_task(server.run_on(listener))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
                try:
                    yield HttpRig(started, front, server, port, http)
                finally:
                    front.end()
                    running.cancel()
                    await asyncio.wait({running})
                    front.close()
