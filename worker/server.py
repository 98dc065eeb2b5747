"""The worker's socket side: loads once, runs steps in order, stays answerable while the model computes. No torch."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import zmq.asyncio
from msgspec.structs import replace

from copyengine.wire.errors import ConfigError, PeerDied, RequestRefused
from copyengine.wire.logs import Log
from copyengine.wire.rpc_server import Call, RpcServer
from worker import protocol
from worker.compute import ComputeThread
from worker.protocol import (
    Done,
    ExpertStats,
    Failed,
    Flush,
    LayerStats,
    LayerStatsReply,
    Load,
    Loaded,
    LoadProgress,
    Mode,
    Release,
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

log = Log(__name__)


class Engine(Protocol):
    """A loaded model. `run`, `layer_stats`, `residency`, `flush` and `verify_slots` are called on the compute thread,
    the rest on the event loop's."""

    @property
    def facts(self) -> Loaded:
        """What was really allocated."""
        ...

    @property
    def lost(self) -> asyncio.Future[str]:
        """Done, with the reason, once no step can run any more: the copy engine died or was too slow."""
        ...

    def run(self, step: RunStep) -> StepDone:
        """Run one step. A SlotstreamError ends this step only, unless `lost` says otherwise."""
        ...

    def stats(self) -> dict[Mode, ExpertStats]:
        """Counters since the start."""
        ...

    def layer_stats(self) -> LayerStatsReply:
        """Counters of each layer since the start, without `oracle`; on the compute thread."""
        ...

    def with_oracle(self, reply: LayerStatsReply) -> LayerStatsReply:
        """The same with it; on a thread of its own, for it may take a second."""
        ...

    def residency(self) -> ResidencyReply:
        """Which experts are in slots; on the compute thread."""
        ...

    def verify_slots(self) -> SlotsVerified:
        """Compare what is in slots with the banks; on the compute thread. RequestRefused("not_verifying")."""
        ...

    def resident(self) -> int:
        """Slots that hold an expert."""
        ...

    def flush(self) -> None:
        """No slot holds an expert any more."""
        ...

    def damaged_steps(self) -> int:
        """Steps that failed because an expert was not what was loaded."""
        ...

    def distrusts_copies(self) -> bool:
        """Whether it is for these that no step runs any more: banks and copies are to be made anew."""
        ...

    def release(self, why: str) -> None:
        """End every wait for copies; steps fail with PeerDied(why) from now on."""
        ...

    def close(self) -> bool:
        """Free its memory. False if the device still uses it."""
        ...


OnProgress = Callable[[LoadProgress], None]
Loader = Callable[[Load, ComputeThread, OnProgress], Awaitable[Engine]]

LAST_STEP_S = 5.0
"""Seconds that steps have to end and be answered once no further one can run."""


class WorkerServer:
    """Serves protocol.Request. Sequences are the scheduler's: a scheduler that disconnects changes nothing here."""

    def __init__(self, context: zmq.asyncio.Context, loader: Loader) -> None:
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.compute = ComputeThread()
        self.engine: Engine | None = None
        self._rpc: RpcServer[protocol.Request, protocol.Reply] = RpcServer(
            context, protocol.Request, self._handle, Failed
        )
        self._loader = loader
        self._asked: Load | None = None
        self._scheduler = b""  # who sent the last Load: KV pages are given out by one scheduler alone
        self._loading: asyncio.Task[Engine] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._watchers: set[asyncio.Queue[LoadProgress]] = set()

    def bind(self, endpoint: str) -> str:
        """Bind; the endpoint really bound. ConfigError if it is taken."""
        return self._rpc.bind(endpoint)

    async def serve(self) -> None:
        """Take requests until Shutdown or until cancelled.

        PeerDied once the engine cannot run steps any more, after those that were under way have been answered. Any
        other error is one of the socket's.
        """
        await self._rpc.serve_until(self._end)

    async def close(self) -> None:
        """Stop serving. A step that runs fails at its next wait for a copy."""
        if self._watch is not None:
            self._watch.cancel()
        if self.engine is not None:
            await asyncio.to_thread(self.engine.release, "the worker is stopping")
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait({self._loading}, timeout=LAST_STEP_S)
        await self._rpc.close()

    async def free(self, deadline_s: float) -> bool:
        """Free the engine's memory, which the copy engine must have let go of, once no step runs.

        False if one still runs after `deadline_s`: then nothing is freed.
        """
        try:
            async with asyncio.timeout(deadline_s):
                engine = self.engine
                return await self.compute.run(engine.close if engine else lambda: True)
        except TimeoutError:
            return False

    async def _handle(self, call: Call[protocol.Request, protocol.Reply]) -> protocol.Reply:
        match call.request:
            case Load() as load:
                return await self._load(call, load)
            case RunStep() as step:
                return await self._run(self._loaded_by(call.peer), step)
            case Release():
                return Done()  # pages and state slots are the scheduler's: written over when it gives them out anew
            case Stats():
                return self._stats(self._loaded())
            case LayerStats():
                engine = self._loaded()
                counted = await self.compute.run(engine.layer_stats)
                return await asyncio.to_thread(engine.with_oracle, counted)
            case Residency():
                return await self.compute.run(self._loaded().residency)
            case Flush():
                engine = self._loaded_by(call.peer)
                await self.compute.run(engine.flush)
                return Done()
            case VerifySlots():
                return await self.compute.run(self._loaded().verify_slots)
            case Shutdown():
                self._finish(None)
                return Done()

    async def _load(self, call: Call[protocol.Request, protocol.Reply], load: Load) -> Loaded:
        """Load, or join the same load, or say what is loaded. ConfigError for another one."""
        if self._loading is None:
            self._asked = load
            self._loading = asyncio.create_task(self._run_loader(load))
        elif self._asked is None or load != replace(self._asked, deadline_s=load.deadline_s):
            raise ConfigError("this worker has another model or other sizes loaded; start it anew for this Load")
        self._scheduler = call.peer
        watcher: asyncio.Queue[LoadProgress] = asyncio.Queue()
        self._watchers.add(watcher)
        relay = asyncio.create_task(_relay(call, watcher))
        try:
            engine = await asyncio.shield(self._loading)
        finally:
            self._watchers.discard(watcher)
            relay.cancel()
        return engine.facts

    async def _run_loader(self, load: Load) -> Engine:
        def tell(progress: LoadProgress) -> None:
            for watcher in self._watchers:
                watcher.put_nowait(progress)

        try:
            self.engine = await self._loader(load, self.compute, tell)
        except BaseException:
            self._loading = self._asked = None  # a Load after this one may try again
            raise
        self._watch = asyncio.create_task(self._end_when_lost(self.engine))
        return self.engine

    async def _end_when_lost(self, engine: Engine) -> None:
        why = await engine.lost
        await self.compute.idle(LAST_STEP_S)  # steps are answered in their order, before this returns
        self._finish(PeerDied(f"no step can run any more, so this worker ends: {why}"))

    def _finish(self, error: PeerDied | None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    async def _run(self, engine: Engine, step: RunStep) -> StepDone:
        done = await self.compute.run(lambda: engine.run(step))
        return replace(done, resident=engine.resident())

    def _loaded(self) -> Engine:
        if self.engine is None:
            raise RequestRefused("not_loaded", "send Load first")
        return self.engine

    def _loaded_by(self, peer: bytes) -> Engine:
        engine = self._loaded()
        if peer != self._scheduler:
            raise RequestRefused("taken_over", "another scheduler has sent this worker a Load and has it now")
        return engine

    def _stats(self, engine: Engine) -> StatsReply:
        counters = engine.stats()
        return StatsReply(
            decode=counters["decode"],
            demand=counters["demand"],
            streamed=counters["streamed"],
            slots=engine.facts.slots,
            resident=engine.resident(),
            dropped_frames=self._rpc.dropped_frames,
            damaged_steps=engine.damaged_steps(),
        )


async def _relay(call: Call[protocol.Request, protocol.Reply], watcher: asyncio.Queue[LoadProgress]) -> None:
    try:
        while True:
            await call.progress(await watcher.get())
    except PeerDied:
        log.info("load_unwatched", detail="the scheduler that asked for the load is gone; loading goes on")
