"""Request and reply over ZMQ: any number of progress replies, then exactly one final reply per request.

A request is two frames from a DEALER socket: an 8-byte call number chosen by the client, and the message. Each reply
carries the same call number. The server's handler returns the final reply, so that there cannot be two or none.
Frames that are malformed, oversized or unknown are counted and dropped; only where the call number is readable does
the sender learn of it, by a Failed("wire").
"""

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from copyengine.wire.codec import MAX_FRAME_NBYTES, Codec
from copyengine.wire.errors import (
    ConfigError,
    PeerDied,
    PeerError,
    PeerTimeout,
    RequestRefused,
    SlotstreamError,
    WireError,
    code_of,
    from_code,
    unforeseen,
)
from copyengine.wire.logs import Log

Req = TypeVar("Req")
Rep = TypeVar("Rep")
K = TypeVar("K")
log = Log(__name__)

CALL_NBYTES = 8
"""Of a call's number, with which each of its replies begins."""

REPLY_GRACE_S = 0.2
"""From the last reply to the closing of the server's socket at least: a client drops what it has not read by then."""

MORE, LAST = int(zmq.DONTWAIT | zmq.SNDMORE), int(zmq.DONTWAIT)
"""Flags of a frame; ints, for joining two of pyzmq's takes as long as sending."""

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

READ_AT_ONCE = 64
"""Replies that a client takes before others on its event loop have a turn."""


class Failure(Protocol):
    """What every protocol's Failed has."""

    @property
    def code(self) -> str: ...

    @property
    def detail(self) -> str: ...


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


class RpcClient(Generic[Req, Rep]):
    """Calls one server. Must be made, used and closed on one running event loop."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        reply_type: Any,
        final: tuple[type, ...],
        failed: type[Failure],
        peer: str,
    ) -> None:
        """Connect; that nobody is there shows only in calls. ConfigError if `endpoint` is none."""
        self.endpoint = endpoint
        self.dropped_frames = 0
        self.lost = asyncio.Event()  # set once the server's connection closed, also while no call is out
        self._peer = peer
        self._codec: Codec[Rep] = Codec(reply_type)
        self._final = final
        self._failed = failed
        self._closed = False
        self._broken: PeerError | None = None  # what every call raises from now on: nothing hears its replies
        self._numbers = itertools.count(1)
        self._calls: dict[bytes, asyncio.Queue[Rep | PeerError]] = {}
        self._socket = context.socket(zmq.DEALER)
        # Takes what is there at once: a future for each reply takes longer than the reply.
        self._receiver: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Who queues nothing for a server that is not there (ZMQ_IMMEDIATE) also loses what it sent before it went. So
        # requests wait for a connection here, and `_left` drops what the next server must not see: old calls.
        self._connected = asyncio.Event()
        if endpoint.startswith("inproc:"):  # has no connections that come and go
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._connected.set()
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        self._arriving: Awaitable[list[bytes]] | None = None  # what `_read` waits for
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(endpoint)
        except (zmq.ZMQError, UnicodeEncodeError) as error:
            self._close_sockets()
            why = zmq.strerror(error.errno or 0) if isinstance(error, zmq.ZMQError) else error
            example = "an endpoint looks like tcp://127.0.0.1:5757"
            raise ConfigError(f"cannot connect to the {peer} at {endpoint!r}: {why}; {example}") from None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._listened)

    async def expect(
        self, request: Req, kind: type[K], deadline_s: float, on_progress: Callable[[Any], None] = lambda _: None
    ) -> K:
        """The final reply, which must be a `kind`; those before it go to `on_progress`. Raises as call and require."""
        async with contextlib.aclosing(self.stream(request, deadline_s)) as replies:
            async for reply in replies:
                if not isinstance(reply, self._final):
                    on_progress(reply)
        return self.require(reply, kind)

    def require(self, reply: Rep, kind: type[K]) -> K:
        """`reply`, if it is a `kind`; else the error that a Failed stands for, or WireError for any other reply."""
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, self._failed):
            raise from_code(reply.code, reply.detail)
        raise WireError(f"the {self._peer} answered with {type(reply).__name__}")

    async def call(self, request: Req, deadline_s: float) -> Rep:
        """The final reply, whatever it is.

        PeerTimeout after `deadline_s` without progress, PeerDied if the server dies, PeerError if this side has failed,
        RequestRefused("invalid_request") if the request cannot be sent at all.
        """
        return [reply async for reply in self.stream(request, deadline_s)][-1]

    async def stream(self, request: Req, deadline_s: float) -> AsyncGenerator[Rep, None]:
        """Every reply, the final one last. Raises as `call` does."""
        if self._closed:
            raise self._gone("the connection was closed")
        if self._broken:
            raise self._broken
        frame = self._encode(request)
        number = next(self._numbers).to_bytes(CALL_NBYTES, "little")
        replies = self._calls[number] = asyncio.Queue()
        try:
            async with asyncio.timeout(deadline_s):
                await self._connected.wait()
                if self._closed:
                    raise self._gone("the connection was closed")
                if self._broken:
                    raise self._broken
                await self._socket.send_multipart([number, frame])
            while True:
                async with asyncio.timeout(deadline_s):
                    reply = await replies.get()
                if isinstance(reply, PeerError):
                    raise reply
                yield reply
                if isinstance(reply, self._final):
                    return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):  # closing the socket cancels what waits to be sent
                raise self._gone("the connection was closed") from None
            raise
        except zmq.Again:  # somebody was there when the request's turn came, and had gone when it was sent
            raise self._gone("its connection closed") from None
        except TimeoutError:
            raise PeerTimeout(f"no answer from the {self._peer} at {self.endpoint} within {deadline_s:g} s") from None
        finally:
            del self._calls[number]

    async def close(self) -> None:
        """End all calls with PeerDied and close the socket, also if this is cancelled. No-op the second time."""
        self._closed = True
        self._connected.set()  # who waits for it learns that it is over
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._fail_all(self._gone("the connection was closed"))
            self._close_sockets()

    def _close_sockets(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def _encode(self, request: Req) -> bytes:
        try:
            return self._codec.encode(request)
        except WireError as error:
            raise RequestRefused("invalid_request", f"the request cannot be encoded: {error}") from None

    def _fail_all(self, error: PeerError) -> None:
        for replies in self._calls.values():
            replies.put_nowait(error)

    def _listened(self, task: asyncio.Task[None]) -> None:
        """Nobody listens any more. If that is for an error of ours, the calls must not wait for their deadlines."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.failed("replies_unreadable", error, words=False, peer=self._peer, endpoint=self.endpoint)
        what = f"the replies of the {self._peer} at {self.endpoint}"
        self._broken = PeerError(f"{what} cannot be read any more: {unforeseen(error)}")
        self._fail_all(self._broken)
        self._connected.set()

    def _gone(self, why: str) -> PeerDied:
        return PeerDied(f"the {self._peer} at {self.endpoint} is gone: {why}")

    async def _read(self) -> None:
        while True:
            self._arriving = self._socket.recv_multipart()
            await self._arriving
            self._take_arrived()
            self._take_what_is_there(READ_AT_ONCE)
            await asyncio.sleep(0)  # waiting for what is there already lets nobody else run

    def _take_arrived(self) -> None:
        """What the future has for which `_read` waits, once."""
        if isinstance(self._arriving, asyncio.Future) and self._arriving.done() and not self._arriving.cancelled():
            arrived, self._arriving = self._arriving, None
            self._take(arrived.result())

    def _take_what_is_there(self, most: int | None = None) -> None:
        """No more than `most` replies."""
        for _ in itertools.count() if most is None else range(most):
            try:
                frames = self._receiver.recv_multipart(LAST)
            except zmq.Again:
                break
            self._take(frames)
        self._socket.get(zmq.EVENTS)  # room to send, whose signal receiving may have taken, is not told again

    def _take(self, frames: list[bytes]) -> None:
        replies = self._calls.get(frames[0]) if len(frames) == 2 else None
        if replies is None:  # the caller gave up, or the frame is junk
            self.dropped_frames += len(frames) != 2
            return
        try:
            replies.put_nowait(self._codec.decode(frames[1]))
        except WireError as error:
            self.dropped_frames += 1
            log.warning("reply_refused", peer=self._peer, detail=str(error))

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._left()
            else:
                self._connected.set()

    def _left(self) -> None:
        """The server closed the connection: hand over what it sent before, end the other calls, drop what is unsent."""
        was_connected = self._connected.is_set()
        self._connected.clear()
        self._take_arrived()
        self._take_what_is_there()
        self.lost.set()
        self._fail_all(self._gone("its connection closed"))
        if was_connected:  # else nothing was sent, and libzmq tries again at its own pace
            self._socket.disconnect(self.endpoint)
            self._socket.connect(self.endpoint)
