"""From a Load to a running engine: the copy engine fills its banks, this process its dense weights, then they attach.

No torch at import: a worker listens before it brings torch in.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from copyengine.protocol import Loaded
from copyengine.protocol import LoadProgress as BankProgress
from copyengine.wire.errors import ConfigError, PeerError
from copyengine.wire.logs import Log
from worker.compute import ComputeThread
from worker.config import WorkerConfig
from worker.copy_engine_link import CopyEngineLink
from worker.protocol import Load, LoadProgress

if TYPE_CHECKING:
    from worker.backend import Backend, Slots
    from worker.building import Prepared
    from worker.engine import Engine

T = TypeVar("T")
OnProgress = Callable[[LoadProgress], None]
log = Log(__name__)


class EngineLoader:
    """Loads the one engine of this process: a worker.server.Loader."""

    def __init__(self, config: WorkerConfig, run_id: str, link: CopyEngineLink) -> None:
        self._config = config
        self._run_id = run_id
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, load: Load, compute: ComputeThread, on_progress: OnProgress) -> "Engine":
        """The loaded engine. ConfigError, PeerDied or PeerTimeout if it cannot be; nothing is left behind then."""
        start_s = time.monotonic()
        backend: Backend = await compute.run(lambda: _open_backend(self._config), discard=_close)
        try:
            return await self._load(load, compute, backend, on_progress, start_s)
        except BaseException:
            await compute.run(lambda: _close(backend))
            raise

    async def _load(
        self, load: Load, compute: ComputeThread, backend: "Backend", on_progress: OnProgress, start_s: float
    ) -> "Engine":
        from worker import building, engine

        tell = self._from_thread(on_progress)
        await self._link.start_clean(load.deadline_s)
        checked = await compute.run(lambda: building.prepare(load, backend, self._config.deterministic))
        banks = await self._fill_banks(load, checked, on_progress)
        prepared = await compute.run(lambda: building.fit(checked, load, backend))
        lost: asyncio.Future[str] = self._loop.create_future()
        pool = await compute.run(
            lambda: building.make_pool(
                prepared,
                backend,
                self._config.name,
                self._run_id,
                self._wake,
                self._from_thread(_first(lost)),
                tell,
                banks,
            ),
            discard=lambda made: _close(made.slots if made else None),
        )
        slots = pool.slots if pool else None
        try:
            broken = self._from_thread(_first(lost))
            runner, kv = await compute.run(lambda: building.build_runner(prepared, load, backend, pool, broken, tell))
            await self._attach(slots)
        except BaseException:
            await self._link.detach()
            await compute.run(lambda: _close(slots))
            raise
        load_s = time.monotonic() - start_s
        facts = building.facts_of(prepared, backend, kv, slots, banks, self._link.kind, load_s)
        facts = replace(facts, deterministic=self._config.deterministic)
        return engine.Engine(facts, runner, slots, backend, lost)

    def close(self) -> None:
        """Stop watching the copy engine."""
        for task in self._tasks:
            task.cancel()

    async def _fill_banks(self, load: Load, prepared: "Prepared", on_progress: OnProgress) -> Loaded:
        """What the copy engine says of its banks, once they are filled."""

        def relay(progress: BankProgress) -> None:
            on_progress(LoadProgress(progress.phase, progress.done_nbytes, progress.total_nbytes, shared=True))

        banks = await self._link.load(load, prepared.dtype, relay)
        expected = prepared.record.record_nbytes if prepared.record else 0
        if banks.record_nbytes != expected:
            raise ConfigError(f"the copy engine's expert records have {banks.record_nbytes} bytes, not {expected}")
        return banks

    async def _attach(self, slots: "Slots | None") -> None:
        """Have the slots served, and released if the copy engine dies. Nothing to do for a dense model."""
        if slots is not None:
            await self._link.attach(slots.attach_request)
            self._spawn(self._release_on_death(slots))

    async def _release_on_death(self, slots: "Slots") -> None:
        await self._link.lost.wait()
        await asyncio.to_thread(slots.release, "the copy engine is gone: its connection closed")

    def _wake(self) -> None:
        """Called by a step, on its thread, when the copy engine sleeps."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(lambda: self._spawn(self._send_wake()))

    async def _send_wake(self) -> None:
        try:
            await self._link.wake()
        except PeerError as error:  # the watch notices its death, the step's own deadline its silence
            log.warning("wake_failed", detail=str(error))

    def _from_thread(self, function: Callable[[T], None]) -> Callable[[T], None]:
        """What may be called from any thread to have `function` called on the event loop's."""

        def tell(value: T) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
                self._loop.call_soon_threadsafe(function, value)

        return tell

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _open_backend(config: WorkerConfig) -> "Backend":
    """The backend that the settings name. ConfigError if it is not there."""
    if config.device == "cuda":
        from worker.cuda_backend import CudaBackend

        return CudaBackend(config.ordinal, local=not config.copy_engine)
    from worker.host_backend import HostBackend

    return HostBackend()


def _close(resource: "Slots | Backend | None") -> None:
    if resource is not None:
        resource.close()


def _first(future: asyncio.Future[str]) -> Callable[[str], None]:
    """Resolves `future` when it is called for the first time."""

    def resolve(value: str) -> None:
        if not future.done():
            future.set_result(value)

    return resolve
