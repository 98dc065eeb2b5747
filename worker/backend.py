"""What a worker runs on, the host or one GPU, as the rest of it sees that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from copyengine.budget import Budget, Wanted
from copyengine.device import OnBytes
from copyengine.model_spec import ModelSpec
from copyengine.protocol import Attach, Dtype
from kernels.formats import RecordLayout
from kernels.grouped_gemm import InputScales
from worker.copy_checks import CopyChecks
from worker.geometry import SlotGeometry
from worker.host_memory import HostMemory
from worker.kv import KvCache
from worker.model.moe import Experts
from worker.model.stack import Decoder
from worker.protocol import ExpertStats, LayerTraffic, Mode
from worker.routing_log import RoutingLog
from worker.step import DecodeGraphs, StepExperts


class Slots(StepExperts, Protocol):
    """A slot pool: what a step needs of it, and what the engine does."""

    @property
    def geometry(self) -> SlotGeometry: ...

    @property
    def attach_request(self) -> Attach: ...

    @property
    def decode_routing(self) -> torch.Tensor:
        """[L, E] int64."""
        ...

    @property
    def log(self) -> RoutingLog:
        """Of the thread that runs steps."""
        ...

    def stats(self) -> dict[Mode, ExpertStats]: ...

    def layer_stats(self) -> dict[Mode, LayerTraffic]: ...

    def residency(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """[L, E]: which experts are in cache slots. Between two steps, on the thread that runs them."""
        ...

    @property
    def checks(self) -> CopyChecks | None:
        """What experts must sum to, with --verify-copies."""
        ...

    def verify(self) -> list[tuple[int, int]]:
        """(layer, expert) of the cache slots that do not hold what was loaded. Between two steps, on the thread that
        runs them, and only with `checks`."""
        ...

    def resident(self) -> int: ...

    def forget(self) -> None:
        """No expert is in a cache slot any more. Between two steps, on the thread that runs them."""
        ...

    def release(self, why: str) -> None: ...

    def close(self) -> bool:
        """Free it. False, and nothing is freed, if something still uses it."""
        ...


@dataclass(frozen=True)
class PoolOrder:
    """What a pool is made for; `wake`, `deadline_s`, `on_release` and `on_bytes` as for host_slots.ExpertSlots."""

    run_id: str
    worker: str
    geometry: SlotGeometry
    layout: RecordLayout
    wake: Callable[[], None]
    deadline_s: float
    on_release: Callable[[str], None]
    on_bytes: OnBytes
    input_scales: Sequence[InputScales] = ()  # each bank's, if the layout's experts quantise their inputs
    checks: CopyChecks | None = None  # with --verify-copies
    fixed_order_of: torch.dtype | None = None  # the type of rows that are to have the bits that they have alone


@dataclass(frozen=True)
class Rehearsal:
    """A model, and the steps that it will be given."""

    spec: ModelSpec
    model: Decoder
    kv: KvCache
    slots: Slots | None  # None for a dense model
    table_pages: int  # of a decode step's page table; 0 if there is none
    largest_step: int  # rows
    max_running: int  # sequences of a decode step


class Backend(Protocol):
    """Memory, slots and graphs of one kind of device. Made and used on the compute thread."""

    @property
    def device(self) -> torch.device:
        """Where tensors go."""
        ...

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def by_page_table(self) -> bool:
        """Whether decode steps come with a page table on the device."""
        ...

    def plan(self, spec: ModelSpec, dtype: Dtype, record_nbytes: int, wanted: Wanted) -> Budget:
        """What fits in the memory that is free now, without the banks; see copyengine.budget. ConfigError."""
        ...

    def make_slots(self, order: PoolOrder) -> tuple[Slots, Experts]:
        """An empty pool, and the experts that come through it. ConfigError if there is too little memory."""
        ...

    def allocate_host(self, nbytes: int) -> HostMemory:
        """Zeroed host memory that the device reads and writes in place, until `close`. ConfigError."""
        ...

    def synchronize(self) -> None:
        """Wait for all that was computed. RuntimeError if the device is broken."""
        ...

    def graphs(self, model: Decoder, max_running: int) -> DecodeGraphs | None:
        """Decode steps of up to `max_running` sequences as graphs; None where there are none."""
        ...

    def rehearse(self, rehearsal: Rehearsal) -> None:
        """Load every kernel that a step may need, before the pool is served."""
        ...

    def close(self) -> None:
        """Give back what is held beside the slots."""
        ...
