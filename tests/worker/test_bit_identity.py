"""A demand chunk gives the bits of the streamed chunk, whatever is resident and however queries are cut.

With the real slot pool and a real copier over shared memory. Checked as torch.equal against a streamed run on a fresh
pool, of final hidden states, logits and the KV written. The pool starts as 0xFF bytes, which are not numbers, so that
an expert computed before it has landed shows.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from copyengine.model_spec import DenseSpec, GqaSpec, LayerSpec, ModelSpec, MoeSpec, RopeSpec
from copyengine.protocol import Dtype
from kernels.formats import RecordLayout, layout
from kernels.grouped_gemm import InputScales
from tests.kernels.expert_records import KINDS, Experts
from tests.worker.random_weights import random_bank, random_weights
from tests.worker.resident_experts import CPU, aligned
from tests.worker.test_host_slots import Rig
from worker.geometry import SlotGeometry
from worker.host_experts import HostExperts
from worker.kv import KvCache
from worker.model import build_model
from worker.protocol import ExpertStats, Mode, RunStep, Sampling, SequenceStep
from worker.step import StepRunner
from worker.weights import TORCH_DTYPES

HIDDEN, INTERMEDIATE, VOCAB, PAGE_TOKENS, PREFIX = 36, 20, 61, 16, 5
SIZES = (1, 2, 96, 97, 512)
GREEDY = Sampling()

Bits = list[torch.Tensor]


def spec_of(experts: int, k: int, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> ModelSpec:
    """Two MoE layers around a dense one."""
    attention = GqaSpec(4, 2, 8, False, True, RopeSpec(1e4))
    moe = LayerSpec(attention, MoeSpec(experts, k, intermediate, True))
    layers = (moe, LayerSpec(attention, DenseSpec(24)), moe)
    return ModelSpec("Qwen3MoeForCausalLM", VOCAB, hidden, 1e-6, 1024, True, "float32", layers)


class Engine:
    """One model over one slot pool; `kind` of kernels.expert_records.KINDS, or experts of `dtype`."""

    def __init__(self, rig: Rig, spec: ModelSpec, dtype: Dtype, routing: str, kind: str) -> None:
        self.rig = rig
        moe, element = spec.moe, TORCH_DTYPES[dtype]
        assert moe is not None
        record = layout(KINDS.get(kind, dtype), spec.hidden, moe.intermediate)
        rig.banks = [bank_of(record, kind, moe.experts, TORCH_DTYPES[dtype], seed).reshape(-1) for seed in (7, 8)]
        rig.slots.pool_bytes[:] = 0xFF
        rig.attach()
        weights = {name: tensor.to(element) for name, tensor in random_weights(spec).items()}
        for name in [name for name in weights if "router" in name]:
            if routing == "few":
                weights[name].zero_()  # all equal: every token goes to the K lowest experts
            else:
                weights[name] *= 3
        self.kv = KvCache(spec, 80, PAGE_TOKENS, element, CPU)
        scales = [InputScales(0.01, 0.003), InputScales(0.002, 0.0001)] if record.kind.quantised_inputs else []
        pool = HostExperts(rig.slots, torch.from_numpy(rig.slots.pool_bytes), record, moe.experts, scales)
        self.runner = StepRunner(spec, build_model(spec, weights, self.kv, pool), self.kv, rig.slots)

    def chunk(self, mode: Mode, tokens: int) -> tuple[Bits, ExpertStats]:
        """A prefix, then a chunk of T = `tokens` after it (of two sequences from 96 on): all that it computes."""
        self.step(mode, [SequenceStep(0, ids(PREFIX), 0, [3], None)])
        first = 40 if tokens >= 96 else tokens
        sequences = [SequenceStep(0, ids(first, 1), PREFIX, list(range(3, 3 + -(-(PREFIX + first) // PAGE_TOKENS))))]
        if tokens > first:
            pages = list(range(79, 79 - -(-(tokens - first) // PAGE_TOKENS), -1))
            sequences.append(SequenceStep(1, ids(tokens - first, 2), 0, pages))
        full = self.runner.run_full(RunStep(mode, sequences))
        used = sorted({page for sequence in sequences for page in sequence.pages})
        kv = [pages[used] for layer in self.kv.layers for pages in (layer.k, layer.v)]
        return [full.hidden, full.logits, *kv], full.result.stats

    def step(self, mode: Mode, sequences: list[SequenceStep]) -> None:
        self.runner.run(RunStep(mode, sequences))

    def decode_a_while(self, seed: int) -> None:
        """Decode steps of other sequences, which leave their experts resident."""
        for position in range(4):
            rows = [SequenceStep(i, ids(1, seed + i + position), position, [60 - i], GREEDY) for i in (5, 6)]
            self.step("decode", rows)


def bank_of(record: RecordLayout, kind: str, experts: int, dtype: torch.dtype, seed: int) -> NDArray[np.uint8]:
    """[E, record_nbytes] uint8, on a 128-byte boundary."""
    if not kind:
        return random_bank(record, experts, dtype, seed)
    bank = aligned(experts * record.record_nbytes).reshape(experts, record.record_nbytes)
    generator = torch.Generator().manual_seed(seed)
    bank[:] = Experts(kind, record.hidden, record.intermediate, experts, generator).records.numpy()
    return bank


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@contextmanager
def engine(
    experts: int,
    k: int,
    dtype: Dtype,
    slots: int,
    max_query: int = 128,
    routing: str = "random",
    kind: str = "",
    half_life: int = 0,
) -> Iterator[Engine]:
    hidden, intermediate = (64, 32) if kind else (HIDDEN, INTERMEDIATE)
    record = layout(KINDS.get(kind, dtype), hidden, intermediate)
    rig = Rig(SlotGeometry(2, experts, record.record_nbytes, slots, max_query=max_query, half_life=half_life))
    try:
        yield Engine(rig, spec_of(experts, k, hidden, intermediate), dtype, routing, kind)
    finally:
        rig.close()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Compute threads: an operation split over two must give the same bits in both modes too."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same_bits(ours: Bits, expected: Bits) -> None:
    for mine, reference in zip(ours, expected, strict=True):
        assert not torch.isnan(reference).any()
        assert torch.equal(mine, reference)


def references(
    experts: int, k: int, dtype: Dtype, routing: str = "random", sizes: tuple[int, ...] = SIZES, kind: str = ""
) -> dict[int, Bits]:
    """Streamed on a pool in which nothing is resident, per T."""
    with engine(experts, k, dtype, slots=experts, routing=routing, kind=kind) as fresh:
        computed = {}
        for tokens in sizes:
            computed[tokens], stats = fresh.chunk("streamed", tokens)
            assert stats.hits == 0 and stats.misses == 2 * experts
        return computed


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (16, 16), (130, 8)])
def test_demand_chunks_of_every_size_on_pools_of_every_size(experts: int, k: int, dtype: Dtype) -> None:
    """S from the least a start allows, min(E, 128), over one layer and a bit, to all experts; queries of 128 and 3."""
    expected = references(experts, k, dtype)
    for slots in (min(experts, 128), experts + 3, 2 * experts):
        for max_query in (128, 3):
            with engine(experts, k, dtype, slots, max_query) as pool:
                for tokens in SIZES:
                    assert_same_bits(pool.chunk("demand", tokens)[0], expected[tokens])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("max_query", [3, 128])
def test_whatever_decode_left_resident(dtype: Dtype, max_query: int) -> None:
    """Demand and streamed chunks between decode steps; residents are found, so that hits compute the same too."""
    expected = references(16, 4, dtype)
    with engine(16, 4, dtype, 19, max_query) as pool:
        hits = 0
        for seed, tokens in enumerate(SIZES):
            for mode in ("demand", "streamed"):
                pool.decode_a_while(seed * 10)
                bits, stats = pool.chunk(mode, tokens)
                assert_same_bits(bits, expected[tokens])
                hits += stats.hits
        assert hits > 0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_experts_of_every_kind(kind: str, dtype: Dtype) -> None:
    """On pools of one layer's experts and of all, by queries of 3, after decode steps; scales of inputs differ by layer
    and do not depend on what is resident."""
    expected = references(8, 3, dtype, sizes=(1, 97), kind=kind)
    for slots in (8, 16):
        with engine(8, 3, dtype, slots, 3, kind=kind) as pool:
            for seed, tokens in enumerate((1, 97)):
                pool.decode_a_while(seed)
                for mode in ("demand", "streamed"):
                    assert_same_bits(pool.chunk(mode, tokens)[0], expected[tokens])


@pytest.mark.usefixtures("one_thread")
def test_whatever_a_scored_policy_left_resident() -> None:
    """Chunks between decode steps with the policy "lrfu", which keeps other experts than "lru" does."""
    expected = references(16, 4, "float32")
    hits = []
    for half_life in (0, 256):
        with engine(16, 4, "float32", 19, 3, half_life=half_life) as pool:
            for seed, tokens in enumerate(SIZES):
                for turn in range(4):
                    pool.decode_a_while(seed * 10 + turn)
                assert_same_bits(pool.chunk("demand", tokens)[0], expected[tokens])
            stats = pool.rig.slots.stats()
            hits.append([stats["decode"].hits, stats["demand"].hits])
    assert hits[0] != hits[1]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("experts", "k"), [(8, 1), (130, 3)])
def test_routing_to_one_expert_or_a_few(experts: int, k: int, dtype: Dtype) -> None:
    """Every token to the K lowest experts; counters by hand."""
    expected = references(experts, k, dtype, "few")
    with engine(experts, k, dtype, min(experts, 128), 3, "few") as pool:
        for tokens in SIZES:
            bits, stats = pool.chunk("demand", tokens)
            assert_same_bits(bits, expected[tokens])
            assert stats.lookups == 2 * k


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_routing_to_all_experts_of_more_than_a_pool(dtype: Dtype) -> None:
    """Every token goes to all 130 experts of both layers, through 128 slots, each fetched once at most."""
    expected = references(130, 130, dtype, sizes=(1, 97))
    for tokens, max_query in ((1, 128), (97, 128), (97, 3)):
        with engine(130, 130, dtype, 128, max_query) as pool:
            bits, stats = pool.chunk("demand", tokens)
            assert_same_bits(bits, expected[tokens])
            assert stats.lookups == 2 * 130 and stats.misses <= 2 * 130


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_with_one_compute_thread_and_with_two(threads: int, dtype: Dtype) -> None:
    """Each against the streamed run with as many threads."""
    expected = references(8, 2, dtype)
    with engine(8, 2, dtype, 8, 3) as pool:
        for tokens in SIZES:
            assert_same_bits(pool.chunk("demand", tokens)[0], expected[tokens])


@pytest.mark.usefixtures("one_thread")
def test_an_expert_that_changes_in_its_bank_changes_the_result() -> None:
    """Against the run before: the equality above must not be that of models that do not look at their experts."""
    with engine(8, 2, "float32", 8) as pool:
        before = pool.chunk("streamed", 97)[0]
        record_nbytes = pool.rig.slots.geometry.record_nbytes
        assert_same_bits(pool.chunk("streamed", 97)[0], before)
        for expert in range(8):
            kept = pool.rig.banks[1].copy()
            pool.rig.banks[1][expert * record_nbytes : (expert + 1) * record_nbytes] = 0
            assert not torch.equal(pool.chunk("streamed", 97)[0][0], before[0])
            pool.rig.banks[1][:] = kept
