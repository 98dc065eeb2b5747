"""The side of `rpc` that asks."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, TypeVar

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
    WireError,
    from_code,
    unforeseen,
)
from copyengine.wire.logs import Log
from copyengine.wire.rpc import CALL_NBYTES, LAST, Failure, Rep, Req

K = TypeVar("K")
log = Log(__name__)

READ_AT_ONCE = 64
"""Replies that a client takes before others on its event loop have a turn."""


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
