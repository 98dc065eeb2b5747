"""What a worker's engine is put together from, of a checkpoint directory, part by part. Brings torch."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

from msgspec import Struct
from msgspec.structs import replace

from copyengine.budget import Budget, Wanted, check_cache_policy
from copyengine.checkpoint.model import Model, dense_file_nbytes, open_model
from copyengine.checksums import unpacked
from copyengine.protocol import Dtype
from copyengine.protocol import Loaded as BanksLoaded
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from copyengine.wire.logs import Log
from kernels.admit import half_life_of
from kernels.formats import RecordLayout
from kernels.grouped_gemm import InputScales
from worker.backend import Backend, PoolOrder, Rehearsal, Slots
from worker.copy_checks import CopyChecks
from worker.dense_steps import DenseSteps
from worker.dummy import dummy_dense
from worker.geometry import SlotGeometry
from worker.host_memory import zeros_in
from worker.kv import KvCache
from worker.mailbox import COPY_DEADLINE_S
from worker.model import build_model
from worker.model.moe import Experts
from worker.model.operations import operations
from worker.protocol import LOGGED_STEPS, Load, Loaded, LoadProgress
from worker.state import StateSlots
from worker.step import StepRunner
from worker.weights import TORCH_DTYPES, load_dense

PROGRESS_S = 0.1
"""Seconds between two progress reports of one phase at least."""

OnProgress = Callable[[LoadProgress], None]
log = Log(__name__)

HALF_LIFE_STEPS = 8
"""Decode steps after which a use counts half in the cache policy "lrfu": of those tried on made-up routing the longest
that never hit less than "lru" (tests/bench/results/LOG.md)."""


class Prepared(Struct, frozen=True):
    """A checkpoint that was checked and fits, with nothing read and nothing allocated."""

    model: Model
    dtype: Dtype
    record: RecordLayout | None  # None for a dense model
    budget: Budget
    half_life: int = 0  # as SlotGeometry has it, and the next
    logged_steps: int = 0
    deterministic: bool = False


def prepare(load: Load, backend: Backend, deterministic: bool = False) -> Prepared:
    """Check the checkpoint and the sizes asked for, before anything large is read or allocated.

    `deterministic` says of which kind the model's operations are to be: worker.model.operations. ConfigError if the
    checkpoint or the sizes are no good. The budget is a first one: `fit` makes the one that holds.
    """
    model = open_model(Path(load.model), load.hf_overrides, load.load_format, load.expert_activations)
    dtype = cast(Dtype, model.spec.checkpoint_dtype if load.dtype == "auto" else load.dtype)
    record = record_layout(model.spec, dtype)
    budget = _budget(model, dtype, record, load, backend)
    logged_steps = LOGGED_STEPS if load.log_routing else 0
    return Prepared(model, dtype, record, budget, _half_life(model, load), logged_steps, deterministic)


def _half_life(model: Model, load: Load) -> int:
    check_cache_policy(model.spec, load.cache_policy)
    if load.cache_policy == "lru":
        return 0
    return half_life_of(len(model.spec.moe_layers), HALF_LIFE_STEPS)


def fit(prepared: Prepared, load: Load, backend: Backend) -> Prepared:
    """`prepared` with the sizes that fit now that the banks have their memory. ConfigError if there is too little."""
    budget = _budget(prepared.model, prepared.dtype, prepared.record, load, backend)
    for note in budget.notes:
        log.warning("memory_note", detail=note)
    return replace(prepared, budget=budget)


def _budget(model: Model, dtype: Dtype, record: RecordLayout | None, load: Load, backend: Backend) -> Budget:
    """The plan for what this worker allocates itself: the banks are the copy engine's, which checks them itself."""
    spec = model.spec
    record_nbytes = record.record_nbytes if record else 0
    wanted = Wanted(
        slots=load.slots,
        kv_tokens=load.kv_tokens,
        demand_prefill=load.demand_prefill,
        max_step_tokens=load.max_step_tokens,
        page_tokens=load.page_tokens,
        max_running=load.max_running,
        vram_reserve_nbytes=load.vram_reserve_nbytes,
        embedding_placement=load.embedding_placement,
        kv_placement=load.kv_placement,
        state_slots=load.state_slots,
    )
    return backend.plan(spec, dtype, record_nbytes, wanted)


class Pool(NamedTuple):
    """The slots of an MoE model, and its experts as they come through them."""

    slots: Slots
    experts: Experts


def make_pool(
    prepared: Prepared,
    backend: Backend,
    worker: str,
    run_id: str,
    wake: Callable[[], None],
    on_release: Callable[[str], None],
    on_progress: OnProgress,
    banks: BanksLoaded,
) -> Pool | None:
    """The slot pool, empty; None for a dense model. ConfigError if there is not enough memory.

    `wake` and `on_release` are called as ExpertSlots says; `banks` is what the copy engine says of its banks.
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
        half_life=prepared.half_life,
        logged_steps=prepared.logged_steps,
    )
    progress = _Progress("slot pool", geometry.pool_slots * geometry.record_nbytes, on_progress)
    record, scales = prepared.record, [InputScales(*pair) for pair in banks.input_scales]
    if len(scales) != (geometry.layers if record.kind.quantised_inputs else 0):
        raise ConfigError(f"the copy engine has input scales of {len(scales)} MoE layers for {record.kind}")
    checks, fixed = copy_checks(banks, geometry), TORCH_DTYPES[prepared.dtype] if prepared.deterministic else None
    told = (wake, COPY_DEADLINE_S, on_release, progress.add)
    order = PoolOrder(run_id, worker, geometry, record, *told, scales, checks, fixed)
    return Pool(*backend.make_slots(order))


def copy_checks(banks: BanksLoaded, geometry: SlotGeometry) -> CopyChecks | None:
    """What a pool's experts must sum to, if the Load has asked the copy engine for checksums: with --verify-copies."""
    if not banks.checksums:
        return None
    return CopyChecks(unpacked(banks.checksums, geometry.layers, geometry.experts), geometry.record_nbytes)


def build_runner(
    prepared: Prepared,
    load: Load,
    backend: Backend,
    pool: Pool | None,
    on_broken: Callable[[str], None],
    on_progress: OnProgress,
) -> tuple[StepRunner, KvCache]:
    """Read the dense weights and put the model together. ConfigError if a file does not hold what it says.

    `on_broken` hears of a device that works no more, where there is no pool that would.
    """
    spec, budget = prepared.model.spec, prepared.budget
    dtype = TORCH_DTYPES[prepared.dtype]
    embedding_in = backend.allocate_host if load.embedding_placement == "host" else None
    if load.load_format == "dummy":
        progress = _Progress("dense weights", budget.dense_nbytes, on_progress)
        weights = dummy_dense(spec, prepared.dtype, backend.device, progress.add, embedding_in)
    else:
        progress = _Progress("dense weights", dense_file_nbytes(prepared.model), on_progress)
        weights = load_dense(prepared.model, prepared.dtype, backend.device, progress.add, embedding_in)
    zeros = zeros_in(backend.allocate_host) if load.kv_placement == "host" else None
    kv = KvCache(spec, budget.kv_tokens // load.page_tokens, load.page_tokens, dtype, backend.device, zeros)
    states = StateSlots(spec, budget.state_slots, backend.device) if budget.state_slots else None
    experts, kind = pool.experts if pool else None, operations(prepared.deterministic)
    decoder = build_model(spec, weights, kv, experts, states, kind)
    longest = min(spec.max_position, kv.num_pages * kv.page_tokens)
    table_pages = -(-longest // kv.page_tokens) if backend.by_page_table else 0
    slots = pool.slots if pool else None
    backend.rehearse(Rehearsal(spec, decoder, kv, slots, table_pages, load.max_step_tokens, load.max_running))
    graphs = backend.graphs(decoder, load.max_running)
    steps = slots or DenseSteps(backend.synchronize, on_broken)
    return StepRunner(spec, decoder, kv, steps, table_pages, graphs, states), kv


def facts_of(
    prepared: Prepared,
    backend: Backend,
    kv: KvCache,
    slots: Slots | None,
    banks: BanksLoaded,
    copy_engine: str,
    load_s: float,
) -> Loaded:
    """What the scheduler is told, as really allocated."""
    spec = prepared.model.spec
    moe = spec.moe
    return Loaded(
        device=backend.name,
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
        bank_nbytes=banks.bank_nbytes,
        pool_nbytes=slots.geometry.pool_slots * slots.geometry.record_nbytes if slots else 0,
        dense_nbytes=prepared.budget.dense_nbytes,
        copy_engine=copy_engine,
        load_s=load_s,
        pinned_nbytes=banks.pinned_nbytes,
        state_slots=prepared.budget.state_slots,
        state_nbytes=prepared.budget.state_nbytes,
    )


class _Progress:
    """Counts the bytes of one phase and reports them now and then, that it begins and the last ones always."""

    def __init__(self, phase: str, total_nbytes: int, tell: OnProgress) -> None:
        self._phase = phase
        self._total_nbytes = total_nbytes
        self._done_nbytes = 0
        self._tell = tell
        self._told_s = time.monotonic()
        tell(LoadProgress(phase, 0, total_nbytes))

    def add(self, nbytes: int) -> None:
        """`nbytes` more were read."""
        self._done_nbytes += nbytes
        now_s = time.monotonic()
        if now_s - self._told_s >= PROGRESS_S or self._done_nbytes == self._total_nbytes:
            self._told_s = now_s
            self._tell(LoadProgress(self._phase, self._done_nbytes, self._total_nbytes))
