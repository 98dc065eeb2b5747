"""The side of `rpc` that answers."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic

import zmq
import zmq.asyncio

from copyengine.wire.codec import MAX_FRAME_NBYTES, Codec
from copyengine.wire.errors import ConfigError, PeerDied, SlotstreamError, WireError, code_of, unforeseen
from copyengine.wire.logs import Log
from copyengine.wire.rpc import CALL_NBYTES, LAST, MORE, Rep, Req

log = Log(__name__)

REPLY_GRACE_S = 0.2
"""From the last reply to the closing of the server's socket at least: a client drops what it has not read by then."""

LOOPBACK = re.compile(r"inproc://.|tcp://(127(\.\d+){3}|localhost|\[::1\]):(\d+|\*)$")

LINGER_MS = 1000
"""Milliseconds that a closed server's socket keeps replies which are on their way; a client that reads has them in one.
The end of the process waits so long for one that does not."""

SEND_QUEUE_REPLIES = 1000
"""Replies that wait for one slow client at most (ZMQ_SNDHWM): thirty seconds of one fast answer, some hundred kB.
Beyond it `Call.send` raises PeerDied, and the request ends as if the client had left."""

SEND_BUFFER_NBYTES = 256 * 2**10
"""That the system may hold of replies to one client beside those. Linux would let it grow to 4 MiB, which is 50,000
tokens that a client has not read."""

FINAL_PATIENCE_S = 30.0
"""Seconds that a final reply waits for room among those: as long as a client takes silence for patience."""

FINAL_RETRY_S = 0.1
"""Seconds between two tries to send it: a client that reads again has its end this late at most."""


class ReadsNothing(PeerDied):
    """SEND_QUEUE_REPLIES wait for the client, which is there."""


class Call(Generic[Req, Rep]):
    """One request being served."""

    def __init__(self, server: "RpcServer[Req, Rep]", peer: bytes, number: bytes, request: Req) -> None:
        self.request = request
        self.peer = peer
        self._server = server
        self._number = number

    def send(self, reply: Rep) -> None:
        """Send a reply that is not the final one. PeerDied if the client is gone, ReadsNothing if it reads nothing."""
        self._server._send(self.peer, self._number, reply)

    async def progress(self, reply: Rep) -> None:
        """The same for who needs an awaitable."""
        self.send(reply)


class RpcServer(Generic[Req, Rep]):
    """Serves one ROUTER socket; each request runs in a task of its own.

    `handler` returns the final reply. A SlotstreamError it raises becomes `failed(code, detail)`; any other
    exception is logged by type and place and becomes `failed("internal", ...)`, which tells the type alone: its words
    may quote the request, and who is told logs them, or tells them to others whose requests end with it.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        request_type: Any,
        handler: Callable[[Call[Req, Rep]], Awaitable[Rep]],
        failed: Callable[[str, str], Rep],
    ) -> None:
        self.dropped_frames = 0
        self._codec: Codec[Req] = Codec(request_type)
        self._handler = handler
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_reply_s = -REPLY_GRACE_S
        self._socket = context.socket(zmq.ROUTER)
        # Sends at once: a future for each reply takes longer than the reply.
        self._sender: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._looking = False
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_REPLIES)
        self._socket.setsockopt(zmq.SNDBUF, SEND_BUFFER_NBYTES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)

    def bind(self, endpoint: str) -> str:
        """Bind; the endpoint really bound (port 0 picks a free one). ConfigError if it is not loopback, or taken."""
        if not LOOPBACK.match(endpoint):
            raise ConfigError(f"cannot listen on {endpoint}: only loopback is served, as tcp://127.0.0.1:PORT")
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}; choose another port") from None
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def serve(self) -> None:
        """Take requests until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != CALL_NBYTES:
                self.dropped_frames += 1
                continue
            peer, number, body = frames
            task = asyncio.create_task(self._answer(peer, number, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def serve_until(self, end: asyncio.Future[None]) -> None:
        """Take requests until `end` is done, whose error it raises, or until cancelled, which cancels `end`.

        Also raises what ends the taking: a process that hears nothing any more must not live on.
        """
        serving = asyncio.create_task(self.serve())
        try:
            done, _ = await asyncio.wait({serving, end}, return_when=asyncio.FIRST_COMPLETED)
            (end if end in done else serving).result()
        finally:
            serving.cancel()
            end.cancel()

    async def close(self) -> None:
        """Cancel what is being served and close the socket; replies already sent are still delivered.

        The last reply is given REPLY_GRACE_S, for clients that drop what they have not read when the connection closes,
        as those with ZMQ_IMMEDIATE do.
        """
        for task in list(self._tasks):
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(self._last_reply_s + REPLY_GRACE_S - time.monotonic())
        finally:
            self._socket.close()

    async def _answer(self, peer: bytes, number: bytes, body: bytes) -> None:
        try:
            request = self._codec.decode(body)
            reply = await self._handler(Call(self, peer, number, request))
        except WireError as error:
            self.dropped_frames += 1
            reply = self._failed("wire", str(error))
        except SlotstreamError as error:
            reply = self._failed(code_of(error), getattr(error, "detail", str(error)))
        except Exception as error:
            log.failed("call_failed", error, words=False)
            reply = self._failed("internal", unforeseen(error))
        await self._send_final(peer, number, reply)

    async def _send_final(self, peer: bytes, number: bytes, reply: Rep) -> None:
        """A client that reads again after a while finds the end of each of its requests."""
        give_up_s = time.monotonic() + FINAL_PATIENCE_S
        while True:
            try:
                return self._send(peer, number, reply)
            except ReadsNothing as error:
                if time.monotonic() >= give_up_s:
                    return log.debug("reply_dropped", detail=str(error))
            except PeerDied:
                return log.debug("client_gone")
            await asyncio.sleep(FINAL_RETRY_S)

    def _send(self, peer: bytes, number: bytes, reply: Rep) -> None:
        body = self._encode(reply)
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)
        try:
            self._sender.send(peer, MORE)  # if one fails it is this one
            self._sender.send(number, MORE)
            self._sender.send(body, LAST)
        except zmq.Again:
            raise ReadsNothing(f"the client does not read its replies ({SEND_QUEUE_REPLIES} waiting)") from None
        except zmq.ZMQError as error:
            raise PeerDied(f"the client is gone: {error.strerror}") from None
        self._last_reply_s = time.monotonic()

    def _look(self) -> None:
        """Have the event loop see requests whose arrival only a send has seen, since the descriptor tells it once.

        Also one that failed: what a send finds before it fails is not told again either.
        """
        self._looking = False
        if not self._socket.closed:
            self._socket.get(zmq.EVENTS)

    def _encode(self, reply: Rep) -> bytes:
        try:
            return self._codec.encode(reply)
        except WireError as error:
            log.failed("reply_unsendable", error, words=False)
            return self._codec.encode(self._failed("internal", "the reply cannot be encoded; the log says where"))
