"""The copy engine's socket side: loads banks, attaches workers, counts. The copying is the copier's (copier.py)."""

import asyncio
import secrets
from concurrent.futures import Future

import zmq.asyncio

from copyengine.config import CopyEngineConfig
from copyengine.copier import Attachment, Copier
from copyengine.device import CopyDevice, Memory, ledger
from copyengine.device.host import HostCopyDevice, attach_segment
from copyengine.loading import BankLoader
from copyengine.protocol import (
    Attach,
    Attached,
    Detach,
    Done,
    Failed,
    Load,
    Reply,
    Request,
    Shutdown,
    Stats,
    StatsReply,
    Wake,
)
from copyengine.ring import Limits, RingReader
from copyengine.wire.errors import PeerDied, RequestRefused, WireError
from copyengine.wire.logs import Log
from copyengine.wire.rpc_server import Call, RpcServer

DEAD_POLL_S = 1.0
"""Between two looks at whether the attached workers live. A dead one's step never ends, so that its ring keeps the copy
loop from sleeping, and its pool's memory stays taken."""

STEP_SPIN_US = 5000
"""On a GPU, while less than this has passed since the last record, the copy loop polls without naps: the layers of a
step follow each other within it, and each would wait for the end of a nap."""

log = Log(__name__)


class CopyEngineServer:
    """Serves protocol.Request on one socket. Make, `bind`, `run` and `close` it on one running event loop."""

    def __init__(
        self,
        config: CopyEngineConfig,
        context: zmq.asyncio.Context,
        device: CopyDevice | None = None,
        local: bool = False,
    ) -> None:
        """`device` is what the config names unless it is given. `local`: the workers are in this process.

        ConfigError if there is no such device.
        """
        self._config = config
        self._local = local
        self._device = device or _open_device(config, local)
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._loader = BankLoader(self._device, config.run_id or secrets.token_hex(4))
        step_spin_us = STEP_SPIN_US if config.device == "cuda" and not local else 0
        self._copier = Copier(
            self._device, config.background_depth, config.spin_us, self._on_copier_death, step_spin_us
        )
        self._watched: dict[str, Attachment] = {}  # by worker; those whose ring's owner can be looked up
        self._rpc: RpcServer[Request, Reply] = RpcServer(context, Request, self._handle, Failed)

    def bind(self) -> str:
        """Bind; the endpoint really bound. ConfigError if it is taken."""
        return self._rpc.bind(self._config.endpoint)

    async def run(self) -> None:
        """Serve until Shutdown or `stop`. PeerDied if the copy loop ends by an error; any other is the socket's."""
        self._copier.start()
        dropping = None if self._local else asyncio.create_task(self._drop_dead())
        try:
            await self._rpc.serve_until(self._end)
        finally:
            if dropping:
                dropping.cancel()

    async def close(self) -> bool:
        """Close the socket and free all memory, also after a `run` that was cancelled or never began.

        False if a copy or a read is stuck. Then its thread and, after a copy, the banks, which the copy may still read,
        are left behind, and the process must end at once.
        """
        await self._rpc.close()
        settled = await asyncio.to_thread(self._copier.stop)
        if not (await self._loader.close(free_banks=settled) and settled):
            return False
        await asyncio.to_thread(self._device.close)
        return True

    def stop(self) -> None:
        """Make `run` return. From any thread."""
        self._loop.call_soon_threadsafe(self._finish, None)

    async def _handle(self, call: Call[Request, Reply]) -> Reply:
        match call.request:
            case Load() as load:
                return await self._loader.load(load, call.progress)
            case Attach() as attach:
                watchable = not self._local and bool(ledger.owned([attach.ring.name]))
                attachment = self._open(attach)
                if watchable:
                    self._watched[attach.worker] = attachment
                await _uncancelled(self._copier.attach(attachment))
                return Attached()
            case Wake():
                self._copier.wake()
                return Done()
            case Stats():
                return self._stats()
            case Detach(worker=worker):
                self._watched.pop(worker, None)
                await _uncancelled(self._copier.detach(worker))
                return Done()
            case Shutdown():
                self._loop.call_soon(self._finish, None)
                return Done()

    def _open(self, attach: Attach) -> Attachment:
        """The worker's memory, mapped and checked."""
        banks = self._loader.banks
        if banks is None or not banks.layers:
            raise RequestRefused("not_loaded", "there are no expert banks; send Load of an MoE model first")
        opened: list[Memory] = []
        try:
            for handle in (attach.pool, attach.flags):
                opened.append(self._device.open(handle))
            ring = attach_segment(attach.ring)
            opened.append(ring)
            if attach.pool.device != attach.flags.device:
                raise WireError(f"the pool is on device {attach.pool.device!r}, the flags on {attach.flags.device!r}")
            if attach.pool.nbytes < attach.pool_slots * banks.record_nbytes:
                raise WireError(f"{attach.pool_slots} slots of {banks.record_nbytes} bytes in {attach.pool.nbytes}")
            if attach.flags.nbytes % 4:
                raise WireError(f"flags are 32-bit words, which {attach.flags.nbytes} bytes are not")
            pool, flags, _ = opened
            limits = Limits(banks.layers, banks.experts, attach.pool_slots, attach.flags.nbytes // 4)
            reader = RingReader(ring.array, limits)
        except BaseException:
            for memory in opened:
                memory.close()
            raise
        return Attachment(attach.worker, banks.banks, banks.record_nbytes, pool, flags, ring, reader)

    async def _drop_dead(self) -> None:
        """Detach workers that are dead, until cancelled; nobody else says so for them."""
        while True:
            await asyncio.sleep(DEAD_POLL_S)
            try:
                await self._drop_dead_once()
            except Exception as error:  # it goes on
                log.failed("look_for_dead_failed", error, words=True)

    async def _drop_dead_once(self) -> None:
        watched = list(self._watched.items())
        living = ledger.owned([attachment.ring.handle.name for _, attachment in watched])
        for worker, attachment in watched:
            if attachment.ring.handle.name in living or self._watched.get(worker) is not attachment:
                continue  # the latter was detached, or replaced, while the one before it was dropped
            del self._watched[worker]
            log.info("worker_detached", worker=worker, detail="it is dead")
            await _uncancelled(self._copier.drop(attachment))

    def _stats(self) -> StatsReply:
        stats, banks = self._copier.stats(), self._loader.banks
        bank_nbytes, pinned_nbytes = (banks.nbytes, banks.pinned_nbytes) if banks else (0, 0)
        return StatsReply(
            **stats.counters,
            bank_nbytes=bank_nbytes,
            pinned_nbytes=pinned_nbytes,
            pageable_nbytes=bank_nbytes - pinned_nbytes,
            workers=stats.workers,
            dropped_frames=self._rpc.dropped_frames,
            asleep=stats.asleep,
            malformed_records=stats.malformed_records,
        )

    def _on_copier_death(self) -> None:
        self._loop.call_soon_threadsafe(self._finish, PeerDied("the copy loop failed; see the log"))

    def _finish(self, error: PeerDied | None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)


def _open_device(config: CopyEngineConfig, local: bool) -> CopyDevice:
    if config.device == "cpu":
        return HostCopyDevice()
    from copyengine.device.cuda import CudaCopyDevice

    return CudaCopyDevice(config.ordinal, local)


async def _uncancelled(done: Future[None]) -> None:
    """Wait for the copier, which carries out what it was told, also if nobody waits any more."""
    await asyncio.shield(asyncio.wrap_future(done))
