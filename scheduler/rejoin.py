"""Workers that were started anew are taken back: connected, loaded, and given to the lane of the one that died."""

import asyncio
from collections.abc import Callable

import zmq.asyncio

from copyengine.wire.errors import ConfigError, SlotstreamError, code_of
from copyengine.wire.lifecycle import Event, Joined, Peer, PeerLost, Progress
from copyengine.wire.logs import Log
from scheduler.config import SchedulerConfig
from scheduler.lane import Lane, collapsed
from scheduler.startup import load_worker, new_core
from scheduler.ticket import Service
from worker.client import WorkerClient
from worker.protocol import Loaded

Tell = Callable[[Event], None]
log = Log(__name__)


class Rejoiner:
    """Has each lane's worker replaced when the parent says that it was started anew, and tells the parent of it.

    `tell` hears of Progress, Joined and PeerLost: also for a worker that lives and cannot be worked with any more, be
    it for an error of ours: a new one comes with a new core.
    """

    def __init__(self, context: zmq.asyncio.Context, config: SchedulerConfig, service: Service, tell: Tell) -> None:
        self._context = context
        self._config = config
        self._service = service
        self._tell = tell

    async def run(self, peers: "asyncio.Queue[Peer]") -> None:
        """Take back those that come through `peers`, until cancelled."""
        lanes = {lane.name: lane for lane in self._service.lanes}
        joining: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            for lane in lanes.values():
                group.create_task(self._watch(lane))
            while True:
                peer = await peers.get()
                if peer.name not in lanes:
                    log.warning("worker_unknown", worker=peer.name, endpoint=peer.endpoint)
                    continue
                if peer.name in joining:
                    joining[peer.name].cancel()  # it has died again
                joining[peer.name] = group.create_task(self._take_back(lanes[peer.name], peer))

    async def _watch(self, lane: Lane) -> None:
        while True:
            if lane.loss and not collapsed(self._service.lanes):  # or else we end, and the worker is well
                self._tell(PeerLost(lane.name, lane.worker.endpoint, lane.loss, lane.death))
            await lane.changed()

    async def _load(self, lane: Lane, worker: WorkerClient) -> Loaded:
        """Raises as load_worker does."""

        def heard(progress: Progress) -> None:
            lane.loading = progress
            self._tell(progress)

        try:
            return await load_worker(worker, lane.name, self._config, heard)
        finally:
            lane.loading = None

    async def _take_back(self, lane: Lane, peer: Peer) -> None:
        try:
            worker = WorkerClient(self._context, peer.endpoint)
        except ConfigError as error:
            self._tell(PeerLost(peer.name, peer.endpoint, code_of(error), str(error)))
            return
        try:
            facts = await self._load(lane, worker)
            check_facts(self._service, facts)
            await lane.revive(worker, new_core(self._config, self._service.demand_tokens, facts), facts)
        except SlotstreamError as error:
            lane.deaths += 1
            if not worker.lost.is_set():  # or else the parent, which sees it end, knows better why
                self._tell(PeerLost(peer.name, peer.endpoint, code_of(error), str(error)))
            await worker.close()
        except BaseException:  # cancelled: it has died again, or we end
            lane.deaths += 1
            await worker.close()
            raise
        else:
            log.info("worker_joined", worker=peer.name, endpoint=peer.endpoint)
            self._tell(Joined(peer.name, peer.endpoint))


def check_facts(service: Service, facts: Loaded) -> None:
    """ConfigError if a worker that was started anew cannot do what was promised to clients at the start."""
    longest = min(facts.max_position, facts.kv_tokens)
    if facts.vocab_size < service.vocab_size or longest < service.max_model_len:
        raise ConfigError(
            f"it now has {facts.vocab_size} tokens in its vocabulary and room for {longest} in a request, where "
            f"{service.vocab_size} and {service.max_model_len} were promised at the start"
        )
