"""One method per operation of the copy engine."""

import asyncio
import contextlib
from collections.abc import Callable

import zmq.asyncio

from copyengine.protocol import (
    FINAL,
    Attach,
    Attached,
    Detach,
    Done,
    Dtype,
    ExpertActivations,
    Failed,
    Load,
    Loaded,
    LoadFormat,
    LoadProgress,
    Reply,
    Request,
    Shutdown,
    Stats,
    StatsReply,
    Wake,
)
from copyengine.wire.errors import PeerDied
from copyengine.wire.rpc_client import RpcClient

LOAD_SILENCE_S = 120.0
"""Seconds without progress after which a load is given up, unless its caller says: a disk that spins up, or a large
allocation before the first byte is read."""

ANSWER_S = 10.0
"""Seconds within which the copy engine answers what needs no disk. Its loop is held up for milliseconds; an attachment
of a large pool on a GPU, which maps it, is what takes longest. When they are over the worker's load fails."""


class CopyEngineClient:
    """Calls one copy engine. Every method raises PeerDied or PeerTimeout if it is gone or silent."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self._rpc: RpcClient[Request, Reply] = RpcClient(context, endpoint, Reply, FINAL, Failed, "copy engine")

    @property
    def endpoint(self) -> str:
        """Where the copy engine listens."""
        return self._rpc.endpoint

    @property
    def lost(self) -> asyncio.Event:
        """Set once its connection closed; never over inproc://, which has none."""
        return self._rpc.lost

    async def load(
        self,
        model: str,
        dtype: Dtype,
        hf_overrides: str = "{}",
        deadline_s: float = LOAD_SILENCE_S,
        on_progress: Callable[[LoadProgress], None] = lambda _: None,
        load_format: LoadFormat = "auto",
        expert_activations: ExpertActivations = "plain",
        checksums: bool = False,
    ) -> Loaded:
        """Load the banks, or join; PeerTimeout after `deadline_s` without progress. ConfigError if it is refused."""
        request = Load(model, dtype, hf_overrides, load_format, expert_activations, checksums)
        return await self._rpc.expect(request, Loaded, deadline_s, on_progress)

    async def attach(self, request: Attach) -> None:
        """Have the ring of a worker served. RequestRefused("not_loaded") before Load, WireError for wrong memory."""
        await self._rpc.expect(request, Attached, ANSWER_S)

    async def wake(self, worker: str) -> None:
        """Have the rings polled."""
        await self._rpc.expect(Wake(worker), Done, ANSWER_S)

    async def stats(self) -> StatsReply:
        """Its counters."""
        return await self._rpc.expect(Stats(), StatsReply, ANSWER_S)

    async def detach(self, worker: str, deadline_s: float = ANSWER_S) -> None:
        """Have a worker forgotten."""
        await self._rpc.expect(Detach(worker), Done, deadline_s)

    async def shutdown(self) -> None:
        """End it. That it is gone is as good an answer as its reply."""
        with contextlib.suppress(PeerDied):
            await self._rpc.expect(Shutdown(), Done, ANSWER_S)

    async def close(self) -> None:
        """Close the connection; the copy engine goes on."""
        await self._rpc.close()
