"""The slot pool of one worker: brings the experts that a step routes to into slots, group by group.

A decode or demand step admits exactly the experts it routes to (kernels.admit) and has the missing ones copied into
cache slots. A streamed step admits nothing and evicts nothing: what is resident is used where it is, all other experts
pass through the stream slots behind the cache slots (worker.stream_cursor).

An expert counts as resident from its admission on, while its record is still on the way. Therefore a step that ends
early waits for what it asked for, and whatever did not land is forgotten before anybody can find it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from copyengine.device import OnBytes, WorkerDevice
from copyengine.protocol import Attach
from copyengine.ring import CopyQuery
from kernels import admit
from worker.copy_checks import CopyChecks
from worker.expert_stats import TrafficCounters, no_traffic
from worker.geometry import SlotGeometry
from worker.mailbox import COPY_DEADLINE_S, Mailbox
from worker.protocol import ExpertStats, LayerTraffic, Mode
from worker.routing_log import RoutingLog
from worker.stream_cursor import StreamCursor


@dataclass(frozen=True)
class Group:
    """Experts whose records are in slots: experts[i] in slots[i], until the next group is asked for."""

    experts: list[int]  # [n] ascending
    slots: list[int]  # [n]


class ExpertSlots:
    """The pool and what is in it. One thread runs steps; `release`, `stats`, `resident` may be called from others."""

    def __init__(
        self,
        device: WorkerDevice,
        run_id: str,
        worker: str,
        geometry: SlotGeometry,
        wake: Callable[[], None],
        deadline_s: float = COPY_DEADLINE_S,
        on_release: Callable[[str], None] = lambda _: None,
        on_bytes: OnBytes | None = None,
        checks: CopyChecks | None = None,
    ) -> None:
        """Allocates pool, flags and ring, all or none; ConfigError if there is not enough memory.

        `wake` is called from the step's thread when a sleeping copy engine must be sent a Wake, and returns at once.
        No wait for copies is longer than `deadline_s`; one that is ends all further steps, as `release` does.
        `on_release` is told why, from the thread on which it happens. `on_bytes` hears of the pool's allocation.
        With `checks` every expert is compared with its bank's checksum before it is computed with.
        """
        self.geometry = geometry
        self.checks = checks
        self._worker = worker
        self._state = admit.new_state(geometry.layers, geometry.experts, geometry.slots, half_life=geometry.half_life)
        self._pool = device.allocate(run_id, f"{worker}-pool", geometry.pool_slots * geometry.record_nbytes, on_bytes)
        flags = geometry.experts + geometry.stream_groups  # a layer has at most E queries
        try:
            self._mailbox = Mailbox(device, run_id, worker, flags, wake, deadline_s, on_release)
        except BaseException:
            self._pool.close()
            raise
        self._routing = np.zeros((geometry.layers, geometry.experts), np.int64)
        self.log = RoutingLog(geometry.logged_steps, geometry.layers, geometry.experts, geometry.slots)
        self._counters = TrafficCounters(geometry.layers, geometry.record_nbytes)
        self._mode: Mode | None = None
        self._traffic = no_traffic(geometry.layers)  # of the running step
        self._cursor = StreamCursor([], 1, 1, 0, 0)
        self._next_layer = 0
        self._damaged = False  # the running step has found an expert that is not what was loaded

    @property
    def attach_request(self) -> Attach:
        """What the copy engine must be told before the first step."""
        return self._mailbox.attach_request(self._worker, self._pool, self.geometry.pool_slots)

    @property
    def pool_bytes(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """[pool_slots, record_nbytes] uint8, cache slots first."""
        return self._pool.array.reshape(self.geometry.pool_slots, self.geometry.record_nbytes)

    @property
    def decode_routing(self) -> torch.Tensor:
        """[L, E] int64: in how many decode steps, failed ones too, each expert was routed to. Without prefill."""
        return torch.from_numpy(self._routing.copy())

    def stats(self) -> dict[Mode, ExpertStats]:
        """Counters since the start, per mode; the running step's are not in it."""
        return self._counters.totals()

    def layer_stats(self) -> dict[Mode, LayerTraffic]:
        """The same by layer; on the thread that runs steps."""
        return self._counters.by_layer()

    def residency(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """See worker.backend.Slots."""
        held: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = (self._state.slot_of != admit.ABSENT).numpy()
        return held

    def verify(self) -> list[tuple[int, int]]:
        """See worker.backend.Slots."""
        assert self.checks is not None
        damaged = []
        for slot, owner in enumerate(self._state.owner.tolist()):
            if owner != admit.ABSENT:
                layer, expert = divmod(owner, self.geometry.experts)
                damaged += [(layer, found) for found in self.checks.damaged(layer, [expert], [slot], self.pool_bytes)]
        return damaged

    def resident(self) -> int:
        """Cache slots that hold an expert."""
        return int((self._state.owner != admit.ABSENT).sum())

    def forget(self) -> None:
        """See worker.backend.Slots."""
        assert self._mode is None, "a step runs"
        admit.forget_all(self._state)

    def begin_step(self, mode: Mode) -> None:
        """Start a step. A streamed one requests its first groups right away. PeerDied, PeerTimeout."""
        assert self._mode is None, "the step before has not ended"
        self._mailbox.begin_step()
        self._mode = mode
        self._traffic.fill(0)
        self.log.begin(mode, self._state.slot_of)
        self._next_layer = 0
        if mode == "streamed":
            geometry = self.geometry
            self._cursor = StreamCursor(
                [(row == admit.ABSENT).nonzero().flatten().tolist() for row in self._state.slot_of],
                geometry.stream_groups,
                geometry.group_slots,
                first_slot=geometry.slots,
                first_flag=geometry.experts,
            )
            self._request_ahead()

    def groups(self, layer: int, experts: list[int]) -> Iterator[Group]:
        """Groups that cover `experts` (distinct, ascending) of bank `layer` once each, as they become available.

        Asking for the next group says that all computing on the last one is done. A streamed step asks for its layers
        in ascending order, each once. CopyFailed, PeerTimeout, PeerDied, RequestRefused("copy_damaged"): then the step
        must be aborted.
        """
        groups = self._groups(layer, experts)
        return groups if self.checks is None else self._checked(self.checks, layer, groups)

    def _groups(self, layer: int, experts: list[int]) -> Iterator[Group]:
        assert self._mode is not None, "no step has begun"
        if self._mode == "streamed":
            return self._streamed(layer, experts)
        if self._mode == "decode":
            self._routing[layer, experts] += 1
        self.log.note(layer, experts)
        self._forget_lost()  # of a layer whose groups were not all asked for
        return self._on_demand(layer, experts)

    def collect(self, tokens: torch.Tensor) -> list[int]:
        """`tokens` as a list: on the host nothing is still being computed."""
        return [int(token) for token in tokens.tolist()]

    def end_step(self) -> ExpertStats:
        """End the step, once nothing it asked for is on the way any more; its counters."""
        stats = self._finish(steps=1)
        self.log.end(stats)
        return stats

    def abort_step(self) -> None:
        """End a step that failed: what did not land, or did and is damaged, is forgotten. Does nothing if no step runs.

        The traffic of the step is counted, the step is not.
        """
        if self._mode is not None:
            self.log.drop()
            self._finish(steps=0)
        if self._damaged:  # others may be that nobody has looked at yet
            for layer, expert in self.verify():
                admit.invalidate(self._state, layer, torch.tensor([expert]))
            self._damaged = False

    def release(self, why: str) -> None:
        """The copy engine is gone: end every wait; from now on all raises PeerDied(why). From any thread."""
        self._mailbox.release(why)

    def close(self) -> bool:
        """Free pool, flags and ring. True: arrays that still look into them keep them."""
        self._mailbox.close()
        self._pool.close()
        return True

    def _finish(self, steps: int) -> ExpertStats:
        assert self._mode is not None, "no step has begun"
        self._forget_lost()
        wait_us = self._mailbox.end_step()
        mode, self._mode = self._mode, None
        return self._counters.add(mode, steps, self._traffic, wait_us)

    def _forget_lost(self) -> None:
        """Wait for all that is on the way; experts that did not land are not resident."""
        for lost in self._mailbox.settle():
            if lost.kind == "demand":
                admit.invalidate(self._state, lost.layer, torch.tensor(lost.experts))

    def _checked(self, checks: CopyChecks, layer: int, groups: Iterator[Group]) -> Iterator[Group]:
        """The groups, each once its slots are found to hold what was loaded; else RequestRefused("copy_damaged")."""
        for group in groups:
            damaged = checks.damaged(layer, group.experts, group.slots, self.pool_bytes)
            if damaged:
                self._damaged = True
                error, why = checks.failed(layer, damaged[0], len(damaged))
                if why is not None:
                    self.release(why)
                raise error
            yield group

    def _on_demand(self, layer: int, experts: list[int]) -> Iterator[Group]:
        cut = admit.cut(self._state, layer, torch.tensor(experts, dtype=torch.int64), self.geometry.max_query)
        if cut.at_once:
            needed = torch.tensor(experts, dtype=torch.int64)
            admitted = [self._admit(flag, layer, query, needed) for flag, query in enumerate(cut.queries)]
            for flag, group in enumerate(admitted):
                self._mailbox.wait(flag)
                yield group
            return
        for i, query in enumerate(cut.queries):
            group = self._admit(0, layer, query, needed=torch.cat(cut.queries[i:]))
            self._mailbox.wait(0)
            yield group

    def _admit(self, flag: int, layer: int, query: torch.Tensor, needed: torch.Tensor) -> Group:
        """Give the query slots, and ring for what is missing."""
        slots, missing = admit.admit(self._state, layer, query, needed, counts=self._mode == "decode")
        copied = query[missing].tolist()
        self._traffic[layer] += (len(query) - len(copied), len(copied))
        if copied:
            self._mailbox.ring(CopyQuery(flag, "demand", layer, tuple(copied), tuple(slots[missing].tolist())))
        return Group(query.tolist(), slots.tolist())

    def _streamed(self, layer: int, experts: list[int]) -> Iterator[Group]:
        assert layer >= self._next_layer, "streamed layers come in ascending order"
        self._next_layer = layer + 1
        slot_of = self._state.slot_of[layer].tolist()
        self._traffic[layer] += (sum(slot != admit.ABSENT for slot in slot_of), 0)
        resident = [expert for expert in experts if slot_of[expert] != admit.ABSENT]
        if resident:
            yield Group(resident, [slot_of[expert] for expert in resident])
        routed = set(experts)
        while (query := self._cursor.due(layer)) is not None:
            self._mailbox.wait(query.flag)
            pairs = zip(query.experts, query.slots, strict=True)
            wanted = [pair for pair in pairs if query.layer == layer and pair[0] in routed]
            if wanted:
                yield Group([expert for expert, _ in wanted], [slot for _, slot in wanted])
            self._cursor.finish()
            self._request_ahead()

    def _request_ahead(self) -> None:
        while (query := self._cursor.next_request()) is not None:
            self._mailbox.ring(query)
            self._traffic[query.layer] += (0, len(query.experts))
