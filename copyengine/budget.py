"""What is asked for, what takes memory, and the bytes of single things: pure, no I/O.

`reckoning.py` makes a Budget of a Wanted, `planning.py` refuses one that does not fit: before anything is started, and
again when a worker allocates.
"""

import math
from typing import Literal

from msgspec import Struct

from copyengine.checkpoint.tensors import dense_tensors, dtype_of
from copyengine.model_spec import ModelSpec
from copyengine.protocol import MAX_QUERY
from copyengine.wire.errors import ConfigError
from kernels.formats import ITEMSIZE

MemoryPlacement = Literal["device", "host"]

GPU_RESERVE_NBYTES = 2 << 30
"""Left free on a GPU before anything runs there: the contexts of the worker and of the copy engine, what libraries and
kernels take, graphs."""

GPU_CONTEXTS_NBYTES = 5 << 28
"""The part of it that the contexts of both take, so that less cannot be left free."""

HOST_RESERVE_NBYTES = 2 << 30
"""Left free in host memory beside pinned banks, once, and once more for each worker: pinned memory is never swapped."""

BANKS = "expert banks"
"""The part that all workers share."""


class Wanted(Struct, frozen=True):
    """What the settings ask for; 0 is auto. The counts of the second group are at least 1."""

    slots: int = 0
    kv_tokens: int = 0
    demand_prefill: bool = True

    max_step_tokens: int = 4096  # T of a prefill step
    page_tokens: int = 16
    max_running: int = 1  # sequences at once, so T of a decode step

    vram_reserve_nbytes: int = 0  # of a GPU
    embedding_placement: MemoryPlacement = "device"
    kv_placement: MemoryPlacement = "device"
    workers: int = 1  # that share the host's memory

    state_slots: int = 0
    prefix_cache: bool = True  # snapshots of recurrent states are of use

    @property
    def largest_step(self) -> tuple[int, str]:
        """T of the largest step, and the flag that sets it."""
        if self.max_running > self.max_step_tokens:
            return self.max_running, "--max-running-requests"
        return self.max_step_tokens, "--chunked-prefill-size"


class Part(Struct, frozen=True):
    """Something that takes memory, as it is called in tables and messages."""

    name: str
    nbytes: int


class Budget(Struct, frozen=True):
    """The sizes of everything large. `parts` are what the memory planned for must hold, on a GPU without the banks;
    `pinned` what the worker of a GPU holds in host memory beside them."""

    slots: int  # S, 0 for a dense model
    query_experts: int  # experts of a query and of a stream group; 0 for a dense model
    stream_groups: int
    kv_tokens: int  # a multiple of page_tokens
    bank_nbytes: int
    pool_nbytes: int  # S + stream slots
    kv_nbytes: int
    dense_nbytes: int
    workspace_nbytes: int  # activations of the largest step, estimated
    reserve_nbytes: int  # left free for what is not planned
    parts: tuple[Part, ...]
    pinned: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()  # what was changed from what was asked
    state_slots: int = 0  # recurrent states, 0 if the model has none
    state_nbytes: int = 0  # of all of them

    @property
    def stream_slots(self) -> int:
        """Slots beyond S, in the same pool."""
        return self.stream_groups * self.query_experts

    @property
    def total_nbytes(self) -> int:
        """Of all parts."""
        return total_nbytes(self.parts)

    @property
    def pinned_nbytes(self) -> int:
        """Of what is pinned beside the banks."""
        return total_nbytes(self.pinned)


def total_nbytes(parts: tuple[Part, ...]) -> int:
    """The sum."""
    return sum(part.nbytes for part in parts)


def gpu_reserve_nbytes(asked_nbytes: int, started: bool = False) -> int:
    """What is to stay free on a GPU, of `asked_nbytes` (0: auto); if the worker has `started`, what still is.

    ConfigError if it is less than the contexts take.
    """
    if 0 < asked_nbytes < GPU_CONTEXTS_NBYTES:
        raise ConfigError(
            f"--vram-reserve-bytes {asked_nbytes}: the contexts of worker and copy engine take "
            f"{GPU_CONTEXTS_NBYTES} bytes of a GPU; leave that much or more"
        )
    return (asked_nbytes or GPU_RESERVE_NBYTES) - (GPU_CONTEXTS_NBYTES if started else 0)


def check_cache_policy(spec: ModelSpec, policy: str) -> None:
    """ConfigError for another policy than "lru" if there are no experts to cache."""
    if policy != "lru" and spec.moe is None:
        raise ConfigError(f"--cache-policy {policy}: a dense model has no experts to cache; leave --cache-policy out")


def least_slots(spec: ModelSpec, demand_prefill: bool) -> int:
    """The smallest S: K, or one whole query of a layer if demand chunks will come. 0 for a dense model."""
    moe = spec.moe
    if moe is None:
        return 0
    return max(moe.experts_per_token, min(moe.experts, MAX_QUERY)) if demand_prefill else moe.experts_per_token


def dense_memory_nbytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes that all weights but the experts take in memory, as `dtype`."""
    return sum(math.prod(shape) * ITEMSIZE[dtype_of(name, dtype)] for name, _, shape in dense_tensors(spec))


def embedding_nbytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of the token embedding, which are among those of all weights but the experts."""
    return spec.vocab_size * spec.hidden * ITEMSIZE[dtype]


def kv_token_nbytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of one token's keys and values over all layers."""
    elements = sum(heads * width for layer in spec.layers for heads, width in layer.attention.kv_shapes)
    return elements * ITEMSIZE[dtype]


def bank_nbytes(spec: ModelSpec, record_nbytes: int) -> int:
    """Bytes of all banks, L x E records; 0 for a dense model."""
    return bank_experts(spec) * record_nbytes


def bank_experts(spec: ModelSpec) -> int:
    """L x E."""
    return len(spec.moe_layers) * spec.moe.experts if spec.moe else 0
