"""From what is asked for and what is free to the sizes of everything large: pure, no I/O.

On the host one memory holds all (`reckon`) and stands in for a GPU's: an automatic slot pool holds a quarter of all
experts, so that offloading really happens. With GPUs there are two: host memory holds the banks, each GPU all else
(`reckon_gpu`), and an automatic pool takes what is left.

What does not depend on how much memory there is comes first, the workspace of the largest step in it; then KV, then
slots. More memory never means less of anything.
"""

import math
from bisect import bisect_right

from msgspec import Struct

from copyengine import gpu_limits
from copyengine.budget import (
    BANKS,
    GPU_RESERVE_NBYTES,
    Budget,
    Part,
    Wanted,
    bank_experts,
    bank_nbytes,
    dense_memory_nbytes,
    embedding_nbytes,
    kv_token_nbytes,
    least_slots,
    total_nbytes,
)
from copyengine.model_spec import ModelSpec
from copyengine.query import DeviceKind, query_experts, stream_groups
from copyengine.wire.errors import ConfigError
from copyengine.workspace import context_nbytes, gpu_step_nbytes, host_step_nbytes

AUTO_SLOT_SHARE = 4
"""On the host an automatic pool holds one expert in this many."""

AUTO_KV_SEQUENCES = 4
"""Automatic KV: so many sequences of full length ..."""

AUTO_KV_TOKENS = 65536
"""... but no more tokens than this, where models of a million would take all memory ..."""

AUTO_KV_SHARE = 4
"""... nor more than one part in this many of what is free."""


def reckon(spec: ModelSpec, dtype: str, record_nbytes: int, available_nbytes: int, wanted: Wanted) -> Budget:
    """The budget of `spec` as `dtype` on the host, whose expert records take `record_nbytes` (0 for a dense model).

    `available_nbytes` is the host memory that is free now. An automatic setting shrinks to what fits, not below what
    the model needs: the sum may be more than there is. ConfigError for sizes that no memory would make right.
    """
    notes = [
        f"--{name}-placement host: on the CPU host and device are the same memory"
        for name, place in (("token-embedding", wanted.embedding_placement), ("kv", wanted.kv_placement))
        if place == "host"
    ]
    if wanted.vram_reserve_nbytes:
        notes.append(f"--vram-reserve-bytes {wanted.vram_reserve_nbytes}: there is no GPU to leave it free on")
    return _Reckoning(spec, dtype, record_nbytes, wanted, "cpu", available_nbytes).budget(notes)


def reckon_gpu(
    spec: ModelSpec,
    dtype: str,
    record_nbytes: int,
    free_nbytes: int,
    wanted: Wanted,
    reserve_nbytes: int = GPU_RESERVE_NBYTES,
    host_nbytes: int = 0,
) -> Budget:
    """`reckon` for a GPU of which `free_nbytes` are free, `reserve_nbytes` of them to stay so. The banks are elsewhere.

    `host_nbytes` of host memory may be pinned for the GPU's worker if the settings place something there. ConfigError
    also for activations that no GPU kernel has, and for a model or slots beyond what the kernels take (`gpu_limits`).
    """
    gpu_limits.check_model(spec)
    if spec.expert_format.name and dtype != "bfloat16":
        raise ConfigError(f"--dtype {dtype}: {spec.expert_format.name} experts need --dtype bfloat16 on a GPU")
    if wanted.embedding_placement == "host" and spec.tie_word_embeddings:
        raise ConfigError(
            "--token-embedding-placement host: this model's token embedding is also its head, which every step reads "
            "whole; use --token-embedding-placement device"
        )
    reckoning = _Reckoning(spec, dtype, record_nbytes, wanted, "cuda", free_nbytes, reserve_nbytes, host_nbytes)
    return reckoning.budget([])


AUTO_SNAPSHOTS = 16
AUTO_SNAPSHOTS_SHARE = 8
"""Automatic state slots: one for each running request, and this many for snapshots, which take at most one part in this
many of what is free. A conversation leaves two or three."""


class _Reckoning(Struct, frozen=True):
    """One model, what is wanted of it, and the memory it goes to."""

    spec: ModelSpec
    dtype: str
    record_nbytes: int
    wanted: Wanted
    device: DeviceKind
    available_nbytes: int
    reserve_nbytes: int = 0
    host_nbytes: int = 0  # beside a GPU

    def budget(self, notes: list[str]) -> Budget:
        """All sizes; `notes` get what was changed from what was asked."""
        fixed, embedding = self._fixed(), self._pinned_embedding_nbytes()
        streams = self._query_experts * self._stream_groups
        free = self.available_nbytes - total_nbytes(fixed) - streams * self.record_nbytes
        least = self._least_slots(notes)
        state_slots, state_cost = self._states(free - least * self.record_nbytes)
        free -= state_cost
        kv_tokens, kv_cost = self._kv(free, free - least * self.record_nbytes, notes)
        slots = least
        if not self.wanted.slots and self.record_nbytes:
            slots = max(least, min(self._most_slots(), (free - kv_cost) // self.record_nbytes))
        pool = Part(f"slot pool ({slots} + {streams})", (slots + streams) * self.record_nbytes)
        kv = Part(f"KV ({kv_tokens} tokens)", kv_tokens * kv_token_nbytes(self.spec, self.dtype))
        context = Part("longest context", self._context_nbytes(kv_tokens))
        states = Part(f"recurrent states ({state_slots})", state_slots * self.spec.state_nbytes)
        here, pinned = ((states,), (kv,)) if self._kv_pinned else ((states, kv), ())
        if embedding:
            pinned = (Part("token embedding", embedding), *pinned)
        return Budget(
            slots=slots,
            query_experts=self._query_experts,
            stream_groups=self._stream_groups,
            kv_tokens=kv_tokens,
            bank_nbytes=bank_nbytes(self.spec, self.record_nbytes),
            pool_nbytes=pool.nbytes,
            kv_nbytes=kv.nbytes,
            dense_nbytes=dense_memory_nbytes(self.spec, self.dtype),
            workspace_nbytes=self._step_nbytes() + context.nbytes,
            reserve_nbytes=self.reserve_nbytes,
            parts=tuple(part for part in (*fixed, context, *here, pool) if part.nbytes),
            pinned=pinned,
            notes=tuple(notes),
            state_slots=state_slots,
            state_nbytes=states.nbytes,
        )

    def _fixed(self) -> tuple[Part, ...]:
        """What does not depend on how much memory there is. A further part is a further row."""
        tokens, _ = self.wanted.largest_step
        banks = bank_nbytes(self.spec, self.record_nbytes) if self.device == "cpu" else 0
        dense = dense_memory_nbytes(self.spec, self.dtype) - self._pinned_embedding_nbytes()
        return (
            Part("to stay free", self.reserve_nbytes),
            Part(BANKS, banks),
            Part("other weights", dense),
            Part(f"workspace ({tokens} tokens a step)", self._step_nbytes()),
        )

    @property
    def _query_experts(self) -> int:
        return query_experts(self._experts, self.device)

    @property
    def _stream_groups(self) -> int:
        return stream_groups(self._experts, self.device)

    @property
    def _experts(self) -> int:
        return self.spec.moe.experts if self.spec.moe else 0

    @property
    def _kv_pinned(self) -> bool:
        return self.device == "cuda" and self.wanted.kv_placement == "host"

    def _pinned_embedding_nbytes(self) -> int:
        placed = self.device == "cuda" and self.wanted.embedding_placement == "host"
        return embedding_nbytes(self.spec, self.dtype) if placed else 0

    def _step_nbytes(self) -> int:
        """Of the largest step, but for what grows with the context."""
        tokens, _ = self.wanted.largest_step
        if self.device == "cuda":
            return gpu_step_nbytes(self.spec, self.dtype, tokens, self.wanted.max_running)
        return host_step_nbytes(self.spec, tokens, self.wanted.max_running)

    def _context_nbytes(self, kv_tokens: int) -> int:
        """What attention takes for the longest context."""
        if self.device == "cuda":
            return 0
        return context_nbytes(self.spec, self.dtype, self.wanted.largest_step[0], kv_tokens)

    def _states(self, free_nbytes: int) -> tuple[int, int]:
        """State slots, and what they keep from KV and slots: for an automatic number the share that snapshots are taken
        from, as with KV. ConfigError if what was asked for is no good."""
        asked, running, nbytes = self.wanted.state_slots, self.wanted.max_running, self.spec.state_nbytes
        if asked and not nbytes:
            raise ConfigError(f"--state-slots {asked}: this model has no recurrent state; leave --state-slots out")
        if 0 < asked < running:
            raise ConfigError(
                f"--state-slots {asked} is too few: each of --max-running-requests {running} has one; use "
                f"--state-slots {running} or more, or --max-running-requests {asked}"
            )
        if asked or not nbytes:
            return asked, asked * nbytes
        most = AUTO_SNAPSHOTS if self.wanted.prefix_cache else 0
        share = max(0, free_nbytes - running * nbytes) // AUTO_SNAPSHOTS_SHARE
        return running + min(most, share // nbytes), running * nbytes + min(share, most * nbytes)

    def _kv(self, free_nbytes: int, beside_slots_nbytes: int, notes: list[str]) -> tuple[int, int]:
        """KV tokens, and what they keep from the slots: for an automatic size not what whole pages take but the share
        that they are taken from, since slots would otherwise be fewer where one more page fits.

        `free_nbytes` is left for KV and slots, `beside_slots_nbytes` of it beside the least slots.
        """
        page = self.wanted.page_tokens
        token_nbytes = kv_token_nbytes(self.spec, self.dtype)

        def cost(tokens: int) -> int:
            return tokens * token_nbytes + self._context_nbytes(tokens)

        if self.wanted.kv_tokens:
            tokens = math.ceil(self.wanted.kv_tokens / page) * page
            if tokens != self.wanted.kv_tokens:
                notes.append(f"--kv-tokens {self.wanted.kv_tokens} is rounded up to whole pages of {page}: {tokens}")
            return tokens, 0 if self._kv_pinned else cost(tokens)
        whole = self.available_nbytes if self.device == "cpu" else free_nbytes
        share = min(whole // AUTO_KV_SHARE, beside_slots_nbytes)
        if self._kv_pinned:
            share = (self.host_nbytes - self._pinned_embedding_nbytes()) // AUTO_KV_SHARE
        most = math.ceil(min(AUTO_KV_SEQUENCES * self.spec.max_position, AUTO_KV_TOKENS) / page)
        pages = bisect_right(range(1, most + 1), share, key=lambda pages: cost(pages * page))
        tokens = max(1, pages) * page
        return tokens, 0 if self._kv_pinned else max(cost(tokens), min(share, cost(most * page)))

    def _most_slots(self) -> int:
        """Of an automatic pool."""
        experts = bank_experts(self.spec)
        return min(experts, gpu_limits.MAX_SLOTS) if self.device == "cuda" else math.ceil(experts / AUTO_SLOT_SHARE)

    def _least_slots(self, notes: list[str]) -> int:
        """The slots that were asked for, or the fewest that an automatic pool has. ConfigError if they are no good."""
        spec, wanted, experts = self.spec, self.wanted, bank_experts(self.spec)
        least = least_slots(spec, wanted.demand_prefill)
        if not wanted.slots:
            return least
        if not experts:
            raise ConfigError(f"--slots {wanted.slots}: a dense model has no experts to hold; leave --slots out")
        if wanted.slots < least:
            fix = f"use --slots {least} or more"
            if wanted.demand_prefill and least > least_slots(spec, False):
                fix += f", or --demand-tokens 0 with --slots {least_slots(spec, False)} or more"
            what = "a demand chunk needs" if wanted.demand_prefill else "one token needs"
            raise ConfigError(f"--slots {wanted.slots} is too few: {what} {least} slots of a layer's experts; {fix}")
        if self.device == "cuda":
            gpu_limits.check_slots(wanted.slots, experts)
        if wanted.slots > experts:
            notes.append(f"--slots {wanted.slots} is more than the model's {experts} experts: {experts} are taken")
        return min(wanted.slots, experts)
