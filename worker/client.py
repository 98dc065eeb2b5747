"""One method per operation of a worker."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import NoReturn

import zmq.asyncio

from copyengine.wire.errors import PeerDied, WireError, from_code
from copyengine.wire.rpc import RpcClient
from worker.protocol import (
    FINAL,
    Done,
    Failed,
    Load,
    Loaded,
    LoadProgress,
    Release,
    Reply,
    Request,
    RunStep,
    Shutdown,
    Stats,
    StatsReply,
    StepDone,
)

ANSWER_S = 10.0
"""Seconds within which a worker answers what needs no model."""


class WorkerClient:
    """Calls one worker. Every method raises PeerDied or PeerTimeout if the worker itself is gone or silent."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self._rpc: RpcClient[Request, Reply] = RpcClient(context, endpoint, Reply, FINAL, "worker")

    @property
    def lost(self) -> asyncio.Event:
        """Set once the worker's connection closed."""
        return self._rpc.lost

    async def load(
        self, request: Load, deadline_s: float, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> Loaded:
        """Load a model; progress renews the deadline. ConfigError if the worker refuses."""
        async for reply in self._rpc.stream(request, deadline_s):
            match reply:
                case LoadProgress() as progress:
                    if on_progress:
                        on_progress(progress)
                case Loaded() as loaded:
                    return loaded
                case other:
                    _refuse(other)
        raise AssertionError("a stream ends with its final reply")

    async def run_step(self, step: RunStep, deadline_s: float) -> StepDone | Failed:
        """Run one step. A step that failed is a value, not an error: the worker goes on and takes the next one."""
        match await self._rpc.call(step, deadline_s):
            case (StepDone() | Failed()) as outcome:
                return outcome
            case other:
                _refuse(other)

    async def release(self, sequences: list[int]) -> None:
        """Forget what the worker keeps for these sequences."""
        await self._done(Release(sequences))

    async def stats(self) -> StatsReply:
        """Its counters."""
        match await self._rpc.call(Stats(), ANSWER_S):
            case StatsReply() as stats:
                return stats
            case other:
                _refuse(other)

    async def shutdown(self) -> None:
        """End the process. That it is gone is as good an answer as its reply."""
        with contextlib.suppress(PeerDied):
            await self._done(Shutdown())

    async def close(self) -> None:
        """Close the connection; the worker goes on."""
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
            raise WireError(f"the worker answered with {type(other).__name__}")
