"""How much memory a model takes on the host backend, and how many slots and KV tokens fit: pure, no I/O.

`launch.py` asks before it starts anything, the worker asks again when it allocates. Host memory stands in for a GPU's:
an automatic slot pool holds a quarter of all experts, so that offloading really happens.
"""

import math

from msgspec import Struct

from copyengine.checkpoint.tensors import dense_tensors
from copyengine.model_spec import LayerSpec, ModelSpec, MoeSpec
from copyengine.protocol import MAX_QUERY
from copyengine.query import query_experts, stream_groups
from copyengine.wire.errors import ConfigError
from kernels.formats import ITEMSIZE

AUTO_SLOT_SHARE = 4
"""An automatic pool holds one expert in this many."""

AUTO_KV_SEQUENCES = 4
AUTO_KV_TOKENS = 65536
AUTO_KV_SHARE = 4
"""Automatic KV: this many sequences of full length, capped in tokens, and at one part in this many of what is free."""

ATTENTION_ROWS = 512
"""Rows of a sequence that attention takes at once: QUERY_BLOCK of kernels/attention/ref.py."""


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
    dense = dense_memory_nbytes(spec, dtype)
    kv_tokens = _kv_tokens(spec, dtype, available_nbytes, wanted, notes)
    kv = kv_tokens * kv_token_nbytes(spec, dtype)
    workspace = workspace_nbytes(spec, dtype, wanted, kv_tokens)
    experts = spec.moe.experts if spec.moe else 0
    query, groups = query_experts(experts), stream_groups(experts)
    free = available_nbytes - banks - dense - workspace - kv - query * groups * record_nbytes
    slots = _slots(spec, wanted, free // record_nbytes if record_nbytes else 0, notes)
    pool = (slots + query * groups) * record_nbytes
    total = banks + pool + kv + dense + workspace
    budget = Budget(slots, query, groups, kv_tokens, banks, pool, kv, dense, workspace, total, tuple(notes))
    if total > available_nbytes:
        context = context_nbytes(spec, dtype, wanted, kv_tokens)
        raise ConfigError(_too_little(budget, dtype, available_nbytes, wanted, context))
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
    elements = sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in spec.layers)
    return elements * ITEMSIZE[dtype]


def workspace_nbytes(spec: ModelSpec, dtype: str, wanted: Wanted, kv_tokens: int) -> int:
    """An estimate of what the largest step holds for a while.

    The activations of one layer, taken as float32; keys and values of one sequence that is as long as can be; logits
    of every running sequence, and what drawing from one row of them takes, in float64.
    """
    tokens, _ = wanted.largest_step
    row = max(_layer_row(layer, spec.hidden) for layer in spec.layers)
    logits = spec.vocab_size * (4 * wanted.max_running + 6 * 8)
    return 4 * tokens * row + logits + context_nbytes(spec, dtype, wanted, kv_tokens)


def context_nbytes(spec: ModelSpec, dtype: str, wanted: Wanted, kv_tokens: int) -> int:
    """Bytes that attention takes for the context of one sequence of all positions that the KV pages can hold.

    Keys and values are gathered from their pages, then repeated for each head; the mask of ATTENTION_ROWS rows is held
    as bool and as `dtype`. Scores [heads, T, context] are not held. Measured at T = 512, 16 heads and 4 KV heads of 64,
    16,384 positions: peak 185 MB of float32 and 101 of bfloat16, where this says 210 and 109 (torch 2.13, 2-core AMD
    EPYC, 2026-11).
    """
    context = min(spec.max_position, kv_tokens)
    mask = min(wanted.largest_step[0], ATTENTION_ROWS) * (1 + ITEMSIZE[dtype])
    heads = max(2 * (a.heads + a.kv_heads) * a.head_dim for a in (layer.attention for layer in spec.layers))
    return context * (heads * ITEMSIZE[dtype] + mask)


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
    if wanted.slots and not experts:
        raise ConfigError(f"--slots {wanted.slots}: a dense model has no experts to hold; leave --slots out")
    if not wanted.slots:
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


def _too_little(budget: Budget, dtype: str, available_nbytes: int, wanted: Wanted, context: int) -> str:
    tokens, step_flag = wanted.largest_step
    parts = {
        "expert banks": budget.bank_nbytes,
        f"slot pool ({budget.slots} + {budget.stream_slots})": budget.pool_nbytes,
        f"KV ({budget.kv_tokens} tokens)": budget.kv_nbytes,
        "other weights": budget.dense_nbytes,
        f"activations ({tokens} tokens)": budget.workspace_nbytes,
    }
    listed = ", ".join(f"{name} {_mb(nbytes)}" for name, nbytes in parts.items() if nbytes)
    levers = {
        f"--slots (now {wanted.slots})": budget.pool_nbytes if wanted.slots else 0,
        f"--kv-tokens (now {budget.kv_tokens})": budget.kv_nbytes + context,
        f"{step_flag} (now {tokens})": budget.workspace_nbytes - context,
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
