"""How much memory a model takes on the host backend, and how many slots and KV tokens fit: pure, no I/O.

`launch.py` asks before it starts anything, the worker asks again when it allocates. Host memory stands in for a GPU's:
an automatic slot pool holds a quarter of all experts, so that offloading really happens.
"""

import math

from msgspec import Struct

from copyengine.checkpoint.names import dense_names
from copyengine.model_spec import LayerSpec, ModelSpec, MoeSpec
from copyengine.protocol import MAX_QUERY
from copyengine.wire.errors import ConfigError
from kernels.formats import ITEMSIZE

AUTO_SLOT_SHARE = 4
"""An automatic pool holds one expert in this many."""

QUERY_EXPERTS = 32
"""Experts a query is cut at. Less than MAX_QUERY, so that a layer's first experts are computed while its next ones are
copied: time to first token of 128 tokens on demand over E = 128 was 596 ms at 32, 795 ms at 128 (2-core AMD EPYC,
2026-11, tests/bench/results/LOG.md)."""

STREAM_LAYERS = 2
MAX_STREAM_GROUPS = 16
"""Stream slots hold this many layers, one being copied while the other is computed, in this many groups at most."""

AUTO_KV_SEQUENCES = 4
AUTO_KV_TOKENS = 65536
AUTO_KV_SHARE = 4
"""Automatic KV: this many sequences of full length, capped in tokens, and at one part in this many of what is free."""


class Wanted(Struct, frozen=True):
    """What the settings ask for; 0 is auto. `page_tokens` and `max_step_tokens` are at least 1."""

    slots: int = 0
    kv_tokens: int = 0
    demand_prefill: bool = True
    max_step_tokens: int = 4096
    page_tokens: int = 16


class Budget(Struct, frozen=True):
    """The sizes of everything large. `total_nbytes` is the sum of the other sizes in bytes."""

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

    @property
    def stream_slots(self) -> int:
        """Slots beyond S, in the same pool."""
        return self.stream_groups * self.query_experts


def plan(spec: ModelSpec, dtype: str, record_nbytes: int, available_nbytes: int, wanted: Wanted) -> Budget:
    """The budget of `spec` as `dtype`, whose expert records take `record_nbytes` (0 for a dense model).

    `available_nbytes` is the host memory that is free now. An automatic setting shrinks to what fits, not below what
    the model needs. ConfigError names the flag, its value, what is needed and what is there.
    """
    notes: list[str] = []
    banks = _bank_experts(spec) * record_nbytes
    dense = dense_nbytes(spec, dtype)
    workspace = workspace_nbytes(spec, wanted.max_step_tokens)
    kv_tokens = _kv_tokens(spec, dtype, available_nbytes, wanted, notes)
    kv = kv_tokens * kv_token_nbytes(spec, dtype)
    query, groups = stream_groups(spec)
    free = available_nbytes - banks - dense - workspace - kv - query * groups * record_nbytes
    slots = _slots(spec, wanted, free // record_nbytes if record_nbytes else 0, notes)
    pool = (slots + query * groups) * record_nbytes
    total = banks + pool + kv + dense + workspace
    budget = Budget(slots, query, groups, kv_tokens, banks, pool, kv, dense, workspace, total, tuple(notes))
    if total > available_nbytes:
        raise ConfigError(_too_little(budget, dtype, available_nbytes, wanted))
    return budget


def least_slots(spec: ModelSpec, demand_prefill: bool) -> int:
    """The smallest S: K, or one whole query of a layer if demand chunks will come. 0 for a dense model."""
    moe = spec.moe
    if moe is None:
        return 0
    return max(moe.experts_per_token, min(moe.experts, MAX_QUERY)) if demand_prefill else moe.experts_per_token


def stream_groups(spec: ModelSpec) -> tuple[int, int]:
    """Experts in a query or stream group, and how many groups streamed layers pass through. Zeros for a dense model."""
    moe = spec.moe
    if moe is None:
        return 0, 0
    query = min(moe.experts, QUERY_EXPERTS)
    return query, min(STREAM_LAYERS * math.ceil(moe.experts / query), MAX_STREAM_GROUPS)


def dense_nbytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of all weights but the experts, as `dtype`."""
    return sum(math.prod(entry.shape) for entry in dense_names(spec)) * ITEMSIZE[dtype]


def kv_token_nbytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of one token's keys and values over all layers."""
    elements = sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in spec.layers)
    return elements * ITEMSIZE[dtype]


def workspace_nbytes(spec: ModelSpec, max_step_tokens: int) -> int:
    """An estimate of the activations of one layer at T = `max_step_tokens`, taken as float32, and of one logits row."""
    row = max(_layer_row(layer, spec.hidden) for layer in spec.layers)
    return 4 * (max_step_tokens * row + spec.vocab_size)


def _layer_row(layer: LayerSpec, hidden: int) -> int:
    """Elements per token that are alive in one layer at most."""
    attention = (2 * layer.attention.heads + 2 * layer.attention.kv_heads) * layer.attention.head_dim
    match layer.ffn:
        case MoeSpec(experts=experts, experts_per_token=k, intermediate=intermediate):
            ffn = experts + k * (2 * hidden + 3 * intermediate)
        case dense:
            ffn = 3 * dense.intermediate
    return 4 * hidden + max(attention, ffn)


def _bank_experts(spec: ModelSpec) -> int:
    """L x E."""
    return len(spec.moe_layers) * spec.moe.experts if spec.moe else 0


def _slots(spec: ModelSpec, wanted: Wanted, fitting: int, notes: list[str]) -> int:
    experts, least = _bank_experts(spec), least_slots(spec, wanted.demand_prefill)
    if not wanted.slots or not experts:
        if wanted.slots:
            notes.append(f"--slots {wanted.slots} has no effect: a dense model has no experts to hold")
        return max(least, min(math.ceil(experts / AUTO_SLOT_SHARE), fitting))
    if wanted.slots < least:
        fix = f"use --slots {least} or more"
        if wanted.demand_prefill and least > least_slots(spec, False):
            fix += f", or --demand-tokens 0 with --slots {least_slots(spec, False)} or more"
        what = "a demand chunk needs" if wanted.demand_prefill else "one token needs"
        raise ConfigError(f"--slots {wanted.slots} is too few: {what} {least} slots of a layer's experts; {fix}")
    if wanted.slots > experts:
        notes.append(f"--slots {wanted.slots} is more than the model's {experts} experts: {experts} are taken")
    return min(wanted.slots, experts)


def _kv_tokens(spec: ModelSpec, dtype: str, available_nbytes: int, wanted: Wanted, notes: list[str]) -> int:
    page = wanted.page_tokens
    if wanted.kv_tokens:
        tokens = math.ceil(wanted.kv_tokens / page) * page
        if tokens != wanted.kv_tokens:
            notes.append(f"--kv-tokens {wanted.kv_tokens} is rounded up to whole pages of {page}: {tokens}")
        return tokens
    fitting = available_nbytes // AUTO_KV_SHARE // kv_token_nbytes(spec, dtype)
    tokens = min(math.ceil(min(AUTO_KV_SEQUENCES * spec.max_position, AUTO_KV_TOKENS) / page), fitting // page) * page
    if tokens < page:
        raise ConfigError(
            f"--kv-tokens auto: one page of {page} tokens takes {_mb(page * kv_token_nbytes(spec, dtype))}, more than "
            f"a quarter of the {_mb(available_nbytes)} of free memory; free some, or set --kv-tokens {page}"
        )
    return tokens


def _too_little(budget: Budget, dtype: str, available_nbytes: int, wanted: Wanted) -> str:
    parts = {
        "expert banks": budget.bank_nbytes,
        f"slot pool ({budget.slots} + {budget.stream_slots})": budget.pool_nbytes,
        f"KV ({budget.kv_tokens} tokens)": budget.kv_nbytes,
        "other weights": budget.dense_nbytes,
        f"activations ({wanted.max_step_tokens} tokens)": budget.workspace_nbytes,
    }
    listed = ", ".join(f"{name} {_mb(nbytes)}" for name, nbytes in parts.items() if nbytes)
    levers = {
        f"--slots (now {wanted.slots})": budget.pool_nbytes if wanted.slots else 0,
        f"--kv-tokens (now {budget.kv_tokens})": budget.kv_nbytes,
        f"--chunked-prefill-size (now {wanted.max_step_tokens})": budget.workspace_nbytes,
    }
    missing = budget.total_nbytes - available_nbytes
    lever = max(levers, key=lambda name: levers[name])
    if budget.bank_nbytes + budget.dense_nbytes < available_nbytes:
        fix = f"lower {lever}"
    else:
        fix = "the weights alone do not fit: " + (
            "use --dtype bfloat16" if dtype == "float32" else "give a smaller --model"
        )
    return (
        f"host memory: {_mb(budget.total_nbytes)} needed ({listed}), {_mb(available_nbytes)} available; "
        f"{fix} or free {_mb(missing)}"
    )


def _mb(nbytes: int) -> str:
    """Rounded up, so that a shortage never reads as 0."""
    return f"{math.ceil(nbytes / 10**6):,} MB"
