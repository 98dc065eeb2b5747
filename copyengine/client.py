"""One method per operation of the copy engine."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import NoReturn

import zmq.asyncio

from copyengine.protocol import (
    FINAL,
    Attach,
    Attached,
    Detach,
    Done,
    Dtype,
    Failed,
    Load,
    Loaded,
    LoadProgress,
    Reply,
    Request,
    Shutdown,
    Stats,
    StatsReply,
    Wake,
)
from copyengine.wire.errors import PeerDied, WireError, from_code
from copyengine.wire.rpc import RpcClient

ANSWER_S = 10.0
"""Seconds within which the copy engine answers what needs no disk."""


class CopyEngineClient:
    """Calls one copy engine. Every method raises PeerDied or PeerTimeout if it is gone or silent."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self._rpc: RpcClient[Request, Reply] = RpcClient(context, endpoint, Reply, FINAL, "copy engine")

    @property
    def lost(self) -> asyncio.Event:
        """Set once its connection closed; never over inproc://, which has none."""
        return self._rpc.lost

    async def load(
        self,
        model: str,
        dtype: Dtype,
        hf_overrides: str = "{}",
        deadline_s: float = 120.0,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> Loaded:
        """Load the banks, or join; PeerTimeout after `deadline_s` without progress. ConfigError if it is refused."""
        async for reply in self._rpc.stream(Load(model, dtype, hf_overrides), deadline_s):
            match reply:
                case LoadProgress() as progress:
                    if on_progress:
                        on_progress(progress)
                case Loaded() as loaded:
                    return loaded
                case other:
                    _refuse(other)
        raise AssertionError("a stream ends with its final reply")

    async def attach(self, request: Attach) -> None:
        """Have the ring of a worker served. RequestRefused("not_loaded") before Load, WireError for wrong memory."""
        match await self._rpc.call(request, ANSWER_S):
            case Attached():
                return
            case other:
                _refuse(other)

    async def wake(self, worker: str) -> None:
        """Have the rings polled."""
        await self._done(Wake(worker))

    async def stats(self) -> StatsReply:
        """Its counters."""
        match await self._rpc.call(Stats(), ANSWER_S):
            case StatsReply() as stats:
                return stats
            case other:
                _refuse(other)

    async def detach(self, worker: str) -> None:
        """Have a worker forgotten."""
        await self._done(Detach(worker))

    async def shutdown(self) -> None:
        """End it. That it is gone is as good an answer as its reply."""
        with contextlib.suppress(PeerDied):
            await self._done(Shutdown())

    async def close(self) -> None:
        """Close the connection; the copy engine goes on."""
        await self._rpc.close()

    async def _done(self, request: Request) -> None:
        match await self._rpc.call(request, ANSWER_S):
            case Done():
                return
            case other:
                _refuse(other)


def _refuse(reply: Reply) -> NoReturn:
    match reply:
        case Failed(code=code, detail=detail):
            raise from_code(code, detail)
        case other:
            raise WireError(f"the copy engine answered with {type(other).__name__}")
