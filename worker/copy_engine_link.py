"""The worker's copy engine: a process of its own, or a thread of this one."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Literal

import zmq.asyncio

from copyengine.client import CopyEngineClient
from copyengine.config import CopyEngineConfig
from copyengine.protocol import Attach, Dtype, Loaded, LoadProgress
from copyengine.thread import CopyEngineThread
from copyengine.wire.errors import SlotstreamError
from worker.config import WorkerConfig
from worker.protocol import Load

DETACH_S = 1.0
"""Seconds that a farewell may take: a copy engine that hangs is not waited for, and drops a dead worker by itself."""


class CopyEngineLink:
    """Connects on creation. `lost` is set once the copy engine is gone."""

    def __init__(self, context: zmq.asyncio.Context, config: WorkerConfig, run_id: str) -> None:
        self.kind: Literal["process", "thread"] = "process" if config.copy_engine else "thread"
        self._worker = config.name
        self._attached = False
        self._thread: CopyEngineThread | None = None
        endpoint = config.copy_engine
        thread_death = asyncio.Event()
        if not endpoint:
            loop = asyncio.get_running_loop()
            own = CopyEngineConfig(
                run_id=run_id,
                device=config.device,
                ordinal=config.ordinal,
                event_loop=config.event_loop,
                log_level=config.log_level,
            )
            self._thread = CopyEngineThread(own, context, lambda: _set(loop, thread_death))
            endpoint = self._thread.start()
        self._client = CopyEngineClient(context, endpoint)
        self.lost = thread_death if self._thread else self._client.lost

    async def load(self, load: Load, dtype: Dtype, on_progress: Callable[[LoadProgress], None]) -> Loaded:
        """Have the banks filled for `load`. Raises as CopyEngineClient.load does."""
        how = load.load_format, load.expert_activations, load.verify_copies
        return await self._client.load(load.model, dtype, load.hf_overrides, load.deadline_s, on_progress, *how)

    async def attach(self, request: Attach) -> None:
        """Have this worker's ring served."""
        self._attached = True  # also if its answer is not waited for: close must detach
        await self._client.attach(request)

    async def wake(self) -> None:
        """A step is about to ring while the copy engine sleeps."""
        await self._client.wake(self._worker)

    async def start_clean(self, deadline_s: float) -> None:
        """Have the memory let go of that a dead worker of this name has left attached, so that there is room for ours.

        Raises as CopyEngineClient.detach does.
        """
        if self._thread is None:
            await self._client.detach(self._worker, deadline_s)

    async def detach(self) -> bool:
        """Have this worker's memory let go of, before it is freed. False if the copy engine is gone or silent."""
        attached, self._attached = self._attached, False
        if self.lost.is_set():
            return False
        if attached:
            try:
                async with asyncio.timeout(DETACH_S):
                    await self._client.detach(self._worker)
            except (SlotstreamError, TimeoutError):
                return False
        return True

    async def close(self) -> bool:
        """Part from the copy engine; a thread ends. False if something of that thread is stuck and lives on."""
        await self.detach()
        await self._client.close()
        return self._thread is None or await asyncio.to_thread(self._thread.stop)


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(event.set)
