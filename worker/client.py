"""One method per operation of a worker."""

import asyncio
import contextlib
from collections.abc import Callable

import zmq.asyncio

from copyengine.wire.errors import PeerDied
from copyengine.wire.rpc_client import RpcClient
from worker.protocol import (
    FINAL,
    Done,
    Failed,
    Flush,
    LayerStats,
    LayerStatsReply,
    Load,
    Loaded,
    LoadProgress,
    Release,
    Reply,
    Request,
    Residency,
    ResidencyReply,
    RunStep,
    Shutdown,
    SlotsVerified,
    Stats,
    StatsReply,
    StepDone,
    VerifySlots,
)

ANSWER_S = 10.0
"""Seconds within which a worker answers what needs no model. Its event loop does not compute, so that it is held up by
imports alone."""


class WorkerClient:
    """Calls one worker. Every method raises PeerDied or PeerTimeout if the worker itself is gone or silent."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self._rpc: RpcClient[Request, Reply] = RpcClient(context, endpoint, Reply, FINAL, Failed, "worker")

    @property
    def endpoint(self) -> str:
        """Where the worker listens."""
        return self._rpc.endpoint

    @property
    def lost(self) -> asyncio.Event:
        """Set once the worker's connection closed."""
        return self._rpc.lost

    async def load(
        self, request: Load, deadline_s: float, on_progress: Callable[[LoadProgress], None] = lambda _: None
    ) -> Loaded:
        """Load a model; progress renews the deadline. ConfigError if the worker refuses."""
        return await self._rpc.expect(request, Loaded, deadline_s, on_progress)

    async def run_step(self, step: RunStep, deadline_s: float) -> StepDone | Failed:
        """Run one step. A step that failed is a value, not an error: the worker goes on and takes the next one."""
        reply = await self._rpc.call(step, deadline_s)
        return reply if isinstance(reply, Failed) else self._rpc.require(reply, StepDone)

    async def release(self, sequences: list[int], deadline_s: float) -> None:
        """Forget what the worker keeps for these sequences, also while a step runs."""
        await self._rpc.expect(Release(sequences), Done, deadline_s)

    async def stats(self) -> StatsReply:
        """Its counters."""
        return await self._rpc.expect(Stats(), StatsReply, ANSWER_S)

    async def layer_stats(self, deadline_s: float) -> LayerStatsReply:
        """Its counters of each layer, once the step that runs is over."""
        return await self._rpc.expect(LayerStats(), LayerStatsReply, deadline_s)

    async def residency(self, deadline_s: float) -> ResidencyReply:
        """Which experts are in slots, once the step that runs is over."""
        return await self._rpc.expect(Residency(), ResidencyReply, deadline_s)

    async def flush(self, deadline_s: float) -> None:
        """Forget which experts are in slots, once the step that runs is over."""
        await self._rpc.expect(Flush(), Done, deadline_s)

    async def verify_slots(self, deadline_s: float) -> SlotsVerified:
        """Compare what is in its slots with the banks; RequestRefused("not_verifying") without --verify-copies."""
        return await self._rpc.expect(VerifySlots(), SlotsVerified, deadline_s)

    async def shutdown(self) -> None:
        """End the process. That it is gone is as good an answer as its reply."""
        with contextlib.suppress(PeerDied):
            await self._rpc.expect(Shutdown(), Done, ANSWER_S)

    async def close(self) -> None:
        """Close the connection; the worker goes on."""
        await self._rpc.close()
