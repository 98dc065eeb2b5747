"""How much memory a model takes, and how many slots and KV tokens fit: pure, no I/O.

`placement.py` asks before anything is started, the worker asks again when it allocates. On the host one memory holds
everything (`plan`) and stands in for a GPU's: an automatic slot pool holds a quarter of all experts, so that offloading
really happens. With GPUs there are two: host memory holds the banks (`plan_banks`), each GPU all else (`plan_gpu`), and
an automatic pool takes what is left.
"""

import math

from msgspec import Struct

from copyengine import gpu_limits
from copyengine.checkpoint.tensors import dense_tensors
from copyengine.model_spec import ModelSpec
from copyengine.protocol import MAX_QUERY
from copyengine.query import DeviceKind, query_experts, stream_groups
from copyengine.wire.errors import ConfigError
from copyengine.workspace import context_nbytes, gpu_step_nbytes, host_step_nbytes
from kernels.formats import ITEMSIZE

AUTO_SLOT_SHARE = 4
"""On the host an automatic pool holds one expert in this many."""

AUTO_KV_SEQUENCES = 4
AUTO_KV_TOKENS = 65536
AUTO_KV_SHARE = 4
"""Automatic KV: this many sequences of full length, capped in tokens, and at one part in this many of what is free."""

GPU_RESERVE_NBYTES = 2 << 30
"""Left free on a GPU before anything runs there: the contexts of the worker and of the copy engine, what libraries and
kernels take, graphs."""

GPU_RESERVE_STARTED_NBYTES = 3 << 28
"""The part of it that is still to be left free once the worker's context is there."""

HOST_RESERVE_NBYTES = 2 << 30
"""Left free in host memory beside pinned banks, once, and once more for each worker: pinned memory is never swapped."""


class Wanted(Struct, frozen=True):
    """What the settings ask for; 0 is auto. The last three are at least 1."""

    slots: int = 0
    kv_tokens: int = 0
    demand_prefill: bool = True
    max_step_tokens: int = 4096  # T of a prefill step
    page_tokens: int = 16
    max_running: int = 1  # sequences at once, so T of a decode step

    @property
    def largest_step(self) -> tuple[int, str]:
        """T of the largest step, and the flag that sets it."""
        if self.max_running > self.max_step_tokens:
            return self.max_running, "--max-running-requests"
        return self.max_step_tokens, "--chunked-prefill-size"


class Budget(Struct, frozen=True):
    """The sizes of everything large. `total_nbytes` is what the memory planned for must hold, in bytes: the sum of the
    other sizes, on a GPU without the banks."""

    slots: int  # S, 0 for a dense model
    query_experts: int  # experts of a query and of a stream group; 0 for a dense model
    stream_groups: int
    kv_tokens: int  # a multiple of page_tokens
    bank_nbytes: int
    pool_nbytes: int  # S + stream slots
    kv_nbytes: int
    dense_nbytes: int
    workspace_nbytes: int  # activations of the largest step, estimated
    total_nbytes: int
    notes: tuple[str, ...] = ()  # what was changed from what was asked
    reserve_nbytes: int = 0  # left free for what is not planned

    @property
    def stream_slots(self) -> int:
        """Slots beyond S, in the same pool."""
        return self.stream_groups * self.query_experts


def plan(spec: ModelSpec, dtype: str, record_nbytes: int, available_nbytes: int, wanted: Wanted) -> Budget:
    """The budget of `spec` as `dtype` on the host, whose expert records take `record_nbytes` (0 for a dense model).

    `available_nbytes` is the host memory that is free now. An automatic setting shrinks to what fits, not below what
    the model needs. ConfigError names the flag, its value, what is needed and what is there.
    """
    return _plan(spec, dtype, record_nbytes, available_nbytes, wanted, _Place("cpu", "host memory", 0))


def plan_gpu(
    spec: ModelSpec,
    dtype: str,
    record_nbytes: int,
    free_nbytes: int,
    wanted: Wanted,
    reserve_nbytes: int = GPU_RESERVE_NBYTES,
    name: str = "GPU",
) -> Budget:
    """`plan` for a GPU of which `free_nbytes` are free, `reserve_nbytes` of them to stay so. The banks are elsewhere.

    `name` is the GPU's, for messages. ConfigError also for activations that no GPU kernel has, and for a model or slots
    beyond what the kernels take (`gpu_limits`).
    """
    gpu_limits.check_model(spec)
    if spec.expert_format.name and dtype != "bfloat16":
        raise ConfigError(f"--dtype {dtype}: {spec.expert_format.name} experts need --dtype bfloat16 on a GPU")
    return _plan(spec, dtype, record_nbytes, free_nbytes, wanted, _Place("cuda", f"memory of {name}", reserve_nbytes))


def plan_banks(spec: ModelSpec, record_nbytes: int, available_nbytes: int, workers: int) -> int:
    """Bytes of the banks, pinned in host memory. ConfigError if its `available_nbytes` are too few."""
    banks = bank_nbytes(spec, record_nbytes)
    reserve = HOST_RESERVE_NBYTES * (1 + workers)
    missing = banks + reserve - available_nbytes
    if banks and missing > 0:
        raise ConfigError(
            f"host memory: {_mb(banks + reserve)} needed (pinned expert banks {_mb(banks)}, to stay free "
            f"{_mb(reserve)}), {_mb(available_nbytes)} available; give a smaller --model or free {_mb(missing)}"
        )
    return banks


class _Place(Struct, frozen=True):
    """The memory that is planned for."""

    device: DeviceKind
    name: str
    reserve_nbytes: int

    def step_nbytes(self, spec: ModelSpec, dtype: str, wanted: Wanted) -> int:
        """Of the largest step, but for what grows with the context."""
        tokens, _ = wanted.largest_step
        if self.device == "cuda":
            return gpu_step_nbytes(spec, dtype, tokens, wanted.max_running)
        return host_step_nbytes(spec, tokens, wanted.max_running)

    def context_nbytes(self, spec: ModelSpec, dtype: str, wanted: Wanted, kv_tokens: int) -> int:
        """What attention takes for the longest context."""
        return 0 if self.device == "cuda" else context_nbytes(spec, dtype, wanted.largest_step[0], kv_tokens)


def _plan(
    spec: ModelSpec, dtype: str, record_nbytes: int, available_nbytes: int, wanted: Wanted, place: _Place
) -> Budget:
    notes: list[str] = []
    on_gpu = place.device == "cuda"
    experts = spec.moe.experts if spec.moe else 0
    query, groups = query_experts(experts, place.device), stream_groups(experts, place.device)
    banks, streams = bank_nbytes(spec, record_nbytes), query * groups * record_nbytes
    dense, step = dense_memory_nbytes(spec, dtype), place.step_nbytes(spec, dtype, wanted)
    usable = available_nbytes - place.reserve_nbytes
    kv_tokens = _kv_tokens(spec, dtype, usable - dense - step - streams if on_gpu else usable, wanted, place, notes)
    kv = kv_tokens * kv_token_nbytes(spec, dtype)
    context = place.context_nbytes(spec, dtype, wanted, kv_tokens)
    fixed = dense + step + context + kv + streams + (0 if on_gpu else banks)
    slots = _slots(spec, wanted, (usable - fixed) // record_nbytes if record_nbytes else 0, place, notes)
    pool = slots * record_nbytes + streams
    total = fixed - streams + pool + place.reserve_nbytes
    sizes = (slots, query, groups, kv_tokens, banks, pool, kv, dense, step + context, total)
    budget = Budget(*sizes, tuple(notes), place.reserve_nbytes)
    if total > available_nbytes:
        raise ConfigError(_too_little(budget, dtype, available_nbytes, wanted, context, place))
    return budget


def least_slots(spec: ModelSpec, demand_prefill: bool) -> int:
    """The smallest S: K, or one whole query of a layer if demand chunks will come. 0 for a dense model."""
    moe = spec.moe
    if moe is None:
        return 0
    return max(moe.experts_per_token, min(moe.experts, MAX_QUERY)) if demand_prefill else moe.experts_per_token


def dense_memory_nbytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes that all weights but the experts take in memory, as `dtype`."""
    return sum(math.prod(shape) for _, _, shape in dense_tensors(spec)) * ITEMSIZE[dtype]


def kv_token_nbytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of one token's keys and values over all layers."""
    elements = sum(heads * width for layer in spec.layers for heads, width in layer.attention.kv_shapes)
    return elements * ITEMSIZE[dtype]


def bank_nbytes(spec: ModelSpec, record_nbytes: int) -> int:
    """Bytes of all banks, L x E records; 0 for a dense model."""
    return _bank_experts(spec) * record_nbytes


def _bank_experts(spec: ModelSpec) -> int:
    """L x E."""
    return len(spec.moe_layers) * spec.moe.experts if spec.moe else 0


def _slots(spec: ModelSpec, wanted: Wanted, fitting: int, place: _Place, notes: list[str]) -> int:
    experts, least = _bank_experts(spec), least_slots(spec, wanted.demand_prefill)
    if wanted.slots and not experts:
        raise ConfigError(f"--slots {wanted.slots}: a dense model has no experts to hold; leave --slots out")
    if not wanted.slots:
        on_gpu = place.device == "cuda"
        most = min(experts, gpu_limits.MAX_SLOTS) if on_gpu else math.ceil(experts / AUTO_SLOT_SHARE)
        return max(least, min(most, fitting))
    if wanted.slots < least:
        fix = f"use --slots {least} or more"
        if wanted.demand_prefill and least > least_slots(spec, False):
            fix += f", or --demand-tokens 0 with --slots {least_slots(spec, False)} or more"
        what = "a demand chunk needs" if wanted.demand_prefill else "one token needs"
        raise ConfigError(f"--slots {wanted.slots} is too few: {what} {least} slots of a layer's experts; {fix}")
    if place.device == "cuda":
        gpu_limits.check_slots(wanted.slots, experts)
    if wanted.slots > experts:
        notes.append(f"--slots {wanted.slots} is more than the model's {experts} experts: {experts} are taken")
    return min(wanted.slots, experts)


def _kv_tokens(spec: ModelSpec, dtype: str, free_nbytes: int, wanted: Wanted, place: _Place, notes: list[str]) -> int:
    """`free_nbytes`: on a GPU what pool and KV share, on the host all that is free."""
    page = wanted.page_tokens
    if wanted.kv_tokens:
        tokens = math.ceil(wanted.kv_tokens / page) * page
        if tokens != wanted.kv_tokens:
            notes.append(f"--kv-tokens {wanted.kv_tokens} is rounded up to whole pages of {page}: {tokens}")
        return tokens
    fitting = max(0, free_nbytes) // AUTO_KV_SHARE // kv_token_nbytes(spec, dtype)
    tokens = min(math.ceil(min(AUTO_KV_SEQUENCES * spec.max_position, AUTO_KV_TOKENS) / page), fitting // page) * page
    if tokens < page and place.device == "cuda":
        return page  # if there is no room for it, the message lists what takes it
    if tokens < page:
        raise ConfigError(
            f"--kv-tokens auto: one page of {page} tokens takes {_mb(page * kv_token_nbytes(spec, dtype))}, more than "
            f"a quarter of the {_mb(free_nbytes)} of free memory; free some, or set --kv-tokens {page}"
        )
    return tokens


def _too_little(budget: Budget, dtype: str, available_nbytes: int, wanted: Wanted, context: int, place: _Place) -> str:
    tokens, step_flag = wanted.largest_step
    banks = budget.bank_nbytes if place.device == "cpu" else 0
    parts = {
        "expert banks": banks,
        f"slot pool ({budget.slots} + {budget.stream_slots})": budget.pool_nbytes,
        f"KV ({budget.kv_tokens} tokens)": budget.kv_nbytes,
        "other weights": budget.dense_nbytes,
        f"activations ({tokens} tokens)": budget.workspace_nbytes,
        "to stay free": budget.reserve_nbytes,
    }
    listed = ", ".join(f"{name} {_mb(nbytes)}" for name, nbytes in parts.items() if nbytes)
    levers = {
        f"--slots (now {wanted.slots})": budget.pool_nbytes if wanted.slots else 0,
        f"--kv-tokens (now {budget.kv_tokens})": budget.kv_nbytes + context,
        f"{step_flag} (now {tokens})": budget.workspace_nbytes - context,
    }
    missing = budget.total_nbytes - available_nbytes
    lever = max(levers, key=lambda name: levers[name])
    if banks + budget.dense_nbytes + budget.reserve_nbytes < available_nbytes:
        fix = f"lower {lever}"
    else:
        fix = "the weights alone do not fit: " + (
            "use --dtype bfloat16" if dtype == "float32" else "give a smaller --model"
        )
    return (
        f"{place.name}: {_mb(budget.total_nbytes)} needed ({listed}), {_mb(available_nbytes)} available; "
        f"{fix} or free {_mb(missing)}"
    )


def _mb(nbytes: int) -> str:
    """Rounded up, so that a shortage never reads as 0."""
    return f"{math.ceil(nbytes / 10**6):,} MB"
