"""A loaded model: from a checkpoint directory to something that runs steps. Brings torch."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import psutil
import torch
from msgspec import Struct
from msgspec.structs import replace

from copyengine.budget import Budget, Wanted, plan
from copyengine.checkpoint.model import Model, dense_file_nbytes, open_model
from copyengine.device.host import HostWorkerDevice
from copyengine.protocol import Dtype
from kernels.formats import RecordLayout, layout
from worker.kv import KvCache
from worker.model import build_model
from worker.model.moe import ExpertPool
from worker.protocol import ExpertStats, Load, Loaded, LoadProgress, Mode, RunStep
from worker.slots import MODES, ExpertSlots, SlotGeometry
from worker.step import StepRunner
from worker.weights import TORCH_DTYPES, load_dense

DEVICE = torch.device("cpu")
PROGRESS_S = 0.1
"""Seconds between two progress reports of one phase at least."""

COPY_DEADLINE_S = 30.0
"""Seconds that a step waits for one query's copies; then the copy engine is taken for dead, and the worker ends."""

OnProgress = Callable[[LoadProgress], None]
log = logging.getLogger(__name__)


class Prepared(Struct, frozen=True):
    """A checkpoint that was checked and fits, with nothing read and nothing allocated."""

    model: Model
    dtype: Dtype
    record: RecordLayout | None  # None for a dense model
    budget: Budget


def prepare(load: Load) -> Prepared:
    """Check the checkpoint and the sizes asked for, before anything large is read or allocated.

    ConfigError if they are no good. The budget is a first one: `fit` makes the one that holds.
    """
    model = open_model(Path(load.model), load.hf_overrides)
    spec = model.spec
    dtype = cast(Dtype, spec.checkpoint_dtype if load.dtype == "auto" else load.dtype)
    record = layout(dtype, spec.hidden, spec.moe.intermediate) if spec.moe else None
    return Prepared(model, dtype, record, _budget(model, dtype, record, load))


def fit(prepared: Prepared, load: Load) -> Prepared:
    """`prepared` with the sizes that fit now that the banks have their memory. ConfigError if there is too little."""
    budget = _budget(prepared.model, prepared.dtype, prepared.record, load)
    for note in budget.notes:
        log.warning("%s", note)
    return replace(prepared, budget=budget)


def _budget(model: Model, dtype: Dtype, record: RecordLayout | None, load: Load) -> Budget:
    """The plan for what this worker allocates itself.

    The banks are the copy engine's, which may have allocated them long ago, for another worker: it checks them itself.
    The plan counts them, so what is available here is counted with them.
    """
    spec = model.spec
    record_nbytes = record.record_nbytes if record else 0
    bank_nbytes = record_nbytes * len(spec.moe_layers) * (spec.moe.experts if spec.moe else 0)
    wanted = Wanted(
        slots=load.slots,
        kv_tokens=load.kv_tokens,
        demand_prefill=load.demand_prefill,
        max_step_tokens=load.max_step_tokens,
        page_tokens=load.page_tokens,
    )
    return plan(spec, dtype, record_nbytes, psutil.virtual_memory().available + bank_nbytes, wanted)


class Engine:
    """See worker.server.Engine."""

    def __init__(self, facts: Loaded, runner: StepRunner, slots: ExpertSlots | None, lost: asyncio.Future[str]) -> None:
        self.facts = facts
        self.lost = lost
        self._runner = runner
        self._slots = slots

    def run(self, step: RunStep) -> tuple[list[int], ExpertStats]:
        """Run one step on the calling thread. Raises as StepRunner.run does."""
        return self._runner.run(step)

    def stats(self) -> dict[Mode, ExpertStats]:
        """Counters since the start, per mode; a dense model has none."""
        return self._slots.stats() if self._slots else {mode: ExpertStats() for mode in MODES}

    def resident(self) -> int:
        """Slots that hold an expert."""
        return self._slots.resident() if self._slots else 0

    def release(self, why: str) -> None:
        """The copy engine is gone, or we are going: no wait for copies goes on."""
        if self._slots:
            self._slots.release(why)

    def close(self) -> None:
        """Free pool, flags and ring."""
        if self._slots:
            self._slots.close()


def make_slots(
    prepared: Prepared,
    worker: str,
    run_id: str,
    wake: Callable[[], None],
    on_release: Callable[[str], None],
    on_progress: OnProgress,
) -> ExpertSlots | None:
    """The slot pool, empty; None for a dense model. ConfigError if there is not enough shared memory.

    `wake` and `on_release` are called as ExpertSlots says.
    """
    moe = prepared.model.spec.moe
    if moe is None or prepared.record is None:
        return None
    geometry = SlotGeometry(
        layers=len(prepared.model.spec.moe_layers),
        experts=moe.experts,
        record_nbytes=prepared.record.record_nbytes,
        slots=prepared.budget.slots,
        stream_groups=prepared.budget.stream_groups,
        max_query=prepared.budget.query_experts,
    )
    progress = _Progress("slot pool", geometry.pool_slots * geometry.record_nbytes, on_progress)
    device = HostWorkerDevice()
    return ExpertSlots(device, run_id, worker, geometry, wake, COPY_DEADLINE_S, on_release, progress.add)


def build_runner(
    prepared: Prepared, load: Load, slots: ExpertSlots | None, on_progress: OnProgress
) -> tuple[StepRunner, KvCache]:
    """Read the dense weights and put the model together. ConfigError if a file does not hold what it says."""
    spec = prepared.model.spec
    progress = _Progress("dense weights", dense_file_nbytes(prepared.model), on_progress)
    weights = load_dense(prepared.model, prepared.dtype, DEVICE, progress.add)
    dtype = TORCH_DTYPES[prepared.dtype]
    kv = KvCache(spec, prepared.budget.kv_tokens // load.page_tokens, load.page_tokens, dtype, DEVICE)
    experts = None
    if slots is not None and prepared.record is not None:
        experts = ExpertPool(slots, torch.from_numpy(slots.pool_bytes), prepared.record)
    return StepRunner(spec, build_model(spec, weights, kv, experts), kv, slots), kv


def facts_of(
    prepared: Prepared, kv: KvCache, slots: ExpertSlots | None, bank_nbytes: int, copy_engine: str, load_s: float
) -> Loaded:
    """What the scheduler is told, as really allocated."""
    spec = prepared.model.spec
    moe = spec.moe
    return Loaded(
        device=DEVICE.type,
        dtype=prepared.dtype,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        moe_layers=len(spec.moe_layers),
        experts=moe.experts if moe else 0,
        experts_per_token=moe.experts_per_token if moe else 0,
        record_nbytes=prepared.record.record_nbytes if prepared.record else 0,
        slots=slots.geometry.slots if slots else 0,
        stream_slots=slots.geometry.stream_slots if slots else 0,
        kv_tokens=kv.num_pages * kv.page_tokens,
        page_tokens=kv.page_tokens,
        kv_nbytes=kv.nbytes,
        bank_nbytes=bank_nbytes,
        pool_nbytes=slots.pool_bytes.nbytes if slots else 0,
        dense_nbytes=prepared.budget.dense_nbytes,
        copy_engine=copy_engine,
        load_s=load_s,
    )


class _Progress:
    """Counts the bytes of one phase and reports them now and then, the last ones always."""

    def __init__(self, phase: str, total_nbytes: int, tell: OnProgress) -> None:
        self._phase = phase
        self._total_nbytes = total_nbytes
        self._done_nbytes = 0
        self._tell = tell
        self._told_s = 0.0

    def add(self, nbytes: int) -> None:
        """`nbytes` more were read."""
        self._done_nbytes += nbytes
        now_s = time.monotonic()
        if now_s - self._told_s >= PROGRESS_S or self._done_nbytes == self._total_nbytes:
            self._told_s = now_s
            self._tell(LoadProgress(self._phase, self._done_nbytes, self._total_nbytes))
