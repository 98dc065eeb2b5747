"""plan: against sums written out by hand, and against the rules it promises, for arbitrary geometries."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyengine.budget import (
    GPU_RESERVE_NBYTES,
    HOST_RESERVE_NBYTES,
    Wanted,
    dense_memory_nbytes,
    kv_token_nbytes,
    least_slots,
    plan,
    plan_banks,
    plan_gpu,
)
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.families import parse_spec
from copyengine.gpu_limits import MAX_SLOTS
from copyengine.model_spec import ModelSpec
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from kernels.formats import layout

GB = 10**9
TINY = Sizes(layers=2, hidden=8, intermediate=4, heads=2, kv_heads=1, head_dim=4, vocab_size=10)


def spec_of(experts: int, per_token: int, sizes: Sizes = TINY) -> ModelSpec:
    config = model_config(sizes) | {"num_experts": experts, "num_experts_per_tok": per_token}
    return parse_spec(config)


def record_of(spec: ModelSpec, dtype: str = "bfloat16") -> int:
    return layout(dtype, spec.hidden, spec.moe.intermediate).record_nbytes if spec.moe else 0


def test_the_built_in_model() -> None:
    """By hand: 2 x 4 x 32 x 8 KV elements a token; 8 x 64 experts of 196,608 bytes."""
    spec = parse_spec(model_config(Sizes()))
    budget = plan(spec, "bfloat16", record_of(spec), 16 * GB, Wanted())
    assert (budget.slots, budget.stream_slots, budget.kv_tokens) == (128, 128, 32768)
    assert budget.bank_nbytes == 512 * 196_608
    assert budget.pool_nbytes == 256 * 196_608
    assert budget.kv_nbytes == 32768 * 2 * 4 * 32 * 8 * 2
    # embed + head, norms, router, q + o, k + v, q/k norms
    layer = 2 * 256 + 64 * 256 + 2 * 256 * 256 + 2 * 128 * 256 + 2 * 32
    assert budget.dense_nbytes == 2 * (2 * 1536 * 256 + 256 + 8 * layer)
    assert budget.notes == ()


@pytest.mark.parametrize(
    ("experts", "per_token", "demand", "least"),
    [
        (1, 1, True, 1),
        (8, 2, True, 8),
        (8, 2, False, 2),
        (127, 4, True, 127),
        (128, 4, True, 128),
        (129, 4, True, 128),
        (512, 10, True, 128),
        (512, 130, True, 130),
        (512, 10, False, 10),
    ],
)
def test_the_least_slots_are_needed_and_suffice(experts: int, per_token: int, demand: bool, least: int) -> None:
    """Against DESIGN's rule S >= min(E, 128), S >= K; one fewer is refused, naming flag, value, need and fix."""
    spec = spec_of(experts, per_token)
    assert least_slots(spec, demand) == least
    wanted = Wanted(slots=least, demand_prefill=demand)
    assert plan(spec, "bfloat16", record_of(spec), GB, wanted).slots == least
    if least > 1:
        with pytest.raises(ConfigError, match=rf"--slots {least - 1} .*{least}.*use --slots {least}"):
            plan(spec, "bfloat16", record_of(spec), GB, Wanted(slots=least - 1, demand_prefill=demand))


def test_a_refused_pool_names_the_other_way_out() -> None:
    spec = spec_of(512, 10)
    with pytest.raises(ConfigError, match="--demand-tokens 0 with --slots 10"):
        plan(spec, "bfloat16", record_of(spec), GB, Wanted(slots=100))


def test_too_many_slots_are_capped_with_a_note() -> None:
    spec = spec_of(8, 2)
    for wanted, got, notes in ((16, 16, 0), (17, 16, 1), (10**9, 16, 1)):
        budget = plan(spec, "bfloat16", record_of(spec), GB, Wanted(slots=wanted))
        assert (budget.slots, len(budget.notes)) == (got, notes)


def test_a_dense_model_has_no_slots() -> None:
    spec = spec_of(0, 1)
    budget = plan(spec, "float32", 0, GB, Wanted())
    assert (budget.slots, budget.stream_slots, budget.bank_nbytes, budget.pool_nbytes) == (0, 0, 0, 0)
    with pytest.raises(ConfigError, match=r"--slots 5: a dense model .*leave --slots out"):
        plan(spec, "float32", 0, GB, Wanted(slots=5))


def test_kv_pages() -> None:
    spec = spec_of(8, 2)
    for asked, got in ((1, 16), (15, 16), (16, 16), (17, 32)):
        budget = plan(spec, "bfloat16", record_of(spec), GB, Wanted(kv_tokens=asked))
        assert budget.kv_tokens == got and bool(budget.notes) == (asked != got)
    with pytest.raises(ConfigError, match="--kv-tokens"):
        plan(spec, "bfloat16", record_of(spec), 4 * 15 * kv_token_nbytes(spec, "bfloat16"), Wanted())


def test_too_little_memory_names_both_numbers_and_the_flag() -> None:
    spec = parse_spec(model_config(Sizes()))
    for wanted, flag in (
        (Wanted(kv_tokens=10**6), "--kv-tokens"),
        (Wanted(slots=512, max_step_tokens=64, kv_tokens=16), "--slots"),
        (Wanted(max_step_tokens=10**6), "--chunked-prefill-size"),
        (Wanted(max_running=10**6), "--max-running-requests"),
    ):
        with pytest.raises(ConfigError, match=rf"needed.*200 MB available.*lower {flag}"):
            plan(spec, "bfloat16", record_of(spec), 200 * 10**6, wanted)
    sizes = Sizes(layers=1, experts=0, heads=32, kv_heads=32, max_position=10**6)
    with pytest.raises(ConfigError, match="lower --kv-tokens"):  # KV 41 MB, its heads gathered 97 MB, the step 84 MB
        plan(parse_spec(model_config(sizes)), "bfloat16", 0, 100 * 10**6, Wanted(kv_tokens=10_000))
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        plan(spec, "float32", record_of(spec, "float32"), 50 * 10**6, Wanted())


NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def flash_next(**changes: object) -> ModelSpec:
    """Qwen3.8-Flash-Next's geometry as a Qwen3-MoE, with NVFP4 experts."""
    sizes = Sizes(
        layers=48, hidden=2560, intermediate=640, experts=512, experts_per_token=10, heads=24, kv_heads=2, head_dim=256,
        vocab_size=248320, max_position=262144,
    )  # fmt: skip
    return parse_spec(model_config(sizes) | NVFP4 | changes)


def test_flash_next_on_a_gpu_of_16_gb() -> None:
    """By hand, from the geometry: 24,576 experts of 2,765,056 bytes in host memory; the GPU takes what fits of them."""
    spec, free = flash_next(), 16_000_000_000
    record = record_layout(spec, "bfloat16")
    assert record is not None
    budget = plan_gpu(spec, "bfloat16", record.record_nbytes, free, Wanted(max_running=16))
    assert budget.bank_nbytes == plan_banks(spec, record.record_nbytes, 128 * GB, 1) == 24_576 * 2_765_056
    # embed + head, final norm, and per layer: norms, router, q + o, k + v, q/k norms
    layer = 2 * 2560 + 512 * 2560 + 2 * 6144 * 2560 + 2 * 512 * 2560 + 2 * 256
    assert budget.dense_nbytes == 2 * (2 * 248_320 * 2560 + 2560 + 48 * layer)
    assert budget.kv_nbytes == budget.kv_tokens * 48 * 2 * 2 * 256 * 2
    assert (budget.query_experts, budget.stream_groups, budget.stream_slots) == (64, 8, 512)
    # 4,096 rows, twice: 4 x H, router's logits as both types, 10 routes of H + I; 16 rows of logits, 4 changed
    step = 2 * 4096 * (2 * 4 * 2560 + 6 * 512 + 2 * 10 * 3200) + (16 * 6 + 4 * 50) * 248_320
    step += 16 * (65_536 * 8 + 243 * (32 * 12 + 20))  # to draw from
    assert budget.workspace_nbytes == step
    assert budget.slots >= 1000 and budget.kv_tokens >= 8192
    assert free - record.record_nbytes < budget.total_nbytes <= free


@pytest.mark.parametrize("slots", [0, 2100, 24_576, 30_000])
def test_what_launch_planned_fits_the_worker_that_is_told_it(slots: int) -> None:
    """Round trip: the sizes that come out, asked for by name, give the same budget, at the same free memory or more."""
    spec, wanted, record = flash_next(), Wanted(slots=slots, max_running=4), 2_765_056
    budget = plan_gpu(spec, "bfloat16", record, 140 * GB, wanted)
    assert budget.slots == min(slots or 24_576, 24_576) and len(budget.notes) == (slots > 24_576)
    again = msgspec.structs.replace(wanted, slots=budget.slots, kv_tokens=budget.kv_tokens)
    for free in (budget.total_nbytes, 140 * GB):
        told = plan_gpu(spec, "bfloat16", record, free, again)
        assert msgspec.structs.replace(told, notes=budget.notes) == budget
    with pytest.raises(ConfigError, match="lower --"):
        plan_gpu(spec, "bfloat16", record, budget.total_nbytes - 1, again)
    started = plan_gpu(spec, "bfloat16", record, budget.total_nbytes - GPU_RESERVE_NBYTES, again, reserve_nbytes=0)
    assert (started.slots, started.kv_tokens, started.reserve_nbytes) == (budget.slots, budget.kv_tokens, 0)


def test_too_little_gpu_memory_names_the_gpu_both_numbers_and_the_flag() -> None:
    spec, record = flash_next(), 2_765_056
    for wanted, free, words in (
        (Wanted(), 4 * GB, r"memory of cuda:3 X: .* needed .*to stay free.*, 4,000 MB available; the weights alone"),
        (Wanted(slots=5000), 16 * GB, r"slot pool \(5000 \+ 512\).*16,000 MB available; lower --slots \(now 5000\)"),
        (Wanted(kv_tokens=200_000), 16 * GB, r"lower --kv-tokens \(now 200000\)"),
        (Wanted(max_step_tokens=65536, kv_tokens=16), 16 * GB, r"lower --chunked-prefill-size"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            plan_gpu(spec, "bfloat16", record, free, wanted, name="cuda:3 X")
        assert "banks" not in str(caught.value)


def test_banks_leave_host_memory_for_the_processes() -> None:
    """Against the sum by hand, a byte under and over, for one worker and for eight."""
    spec = flash_next(num_hidden_layers=2)
    banks = 2 * 512 * 2_765_056
    for workers in (1, 8):
        needed = banks + (1 + workers) * HOST_RESERVE_NBYTES
        assert plan_banks(spec, 2_765_056, needed, workers) == banks
        with pytest.raises(ConfigError, match=r"host memory: (7|22),\d+ MB needed .*banks 2,832 MB, .*free 1 MB$"):
            plan_banks(spec, 2_765_056, needed - 1, workers)
    assert plan_banks(spec_of(0, 1), 0, 0, 1) == 0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_quantised_experts_are_bfloat16_on_a_gpu(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"--dtype {dtype}: nvfp4 .*--dtype bfloat16"):
        plan_gpu(flash_next(), dtype, 2_765_056, 140 * GB, Wanted())


@given(
    experts=st.integers(0, 600),
    per_token=st.integers(1, 600),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    available=st.integers(0, 20_000_000),
    slots=st.just(0) | st.integers(1, 2000),
    kv_tokens=st.just(0) | st.integers(1, 100_000),
    demand=st.booleans(),
    step=st.integers(1, 8192),
    page=st.integers(1, 64),
)
def test_the_rules_hold_for_every_budget(
    experts: int,
    per_token: int,
    dtype: str,
    available: int,
    slots: int,
    kv_tokens: int,
    demand: bool,
    step: int,
    page: int,
) -> None:
    if experts and per_token > experts:
        return
    spec = spec_of(experts, per_token)
    record = record_of(spec, dtype)
    wanted = Wanted(slots, kv_tokens, demand, step, page)
    try:
        budget = plan(spec, dtype, record, available, wanted)
    except ConfigError as error:
        assert "--" in str(error) and any(c.isdigit() for c in str(error))
        return
    parts = (budget.bank_nbytes, budget.pool_nbytes, budget.kv_nbytes, budget.dense_nbytes, budget.workspace_nbytes)
    assert sum(parts) == budget.total_nbytes <= available
    assert budget.bank_nbytes == 2 * experts * record
    assert budget.pool_nbytes == (budget.slots + budget.stream_slots) * record
    assert budget.kv_tokens % page == 0 and budget.kv_tokens >= max(page, kv_tokens)
    assert budget.dense_nbytes == dense_memory_nbytes(spec, dtype)
    assert least_slots(spec, demand) <= budget.slots <= 2 * experts
    if slots and experts:
        assert budget.slots == min(slots, 2 * experts)
    elif experts:
        assert budget.slots <= max(math.ceil(experts / 2), least_slots(spec, demand))
    else:
        assert budget.slots == budget.stream_slots == 0


def test_a_gpu_gets_no_more_slots_than_its_kernels_take() -> None:
    """Auto stops there; a larger --slots is refused, unless the model's experts are fewer. On the host none is."""
    spec, free = spec_of(4096, 2, msgspec.structs.replace(TINY, layers=9)), 100 * GB  # 36,864 experts
    record = record_of(spec)
    for asked in (0, MAX_SLOTS - 1, MAX_SLOTS):
        assert plan_gpu(spec, "bfloat16", record, free, Wanted(slots=asked)).slots == (asked or MAX_SLOTS)
    for asked in (MAX_SLOTS + 1, 36_864, 10**9):
        with pytest.raises(ConfigError, match=rf"--slots {asked} .*{MAX_SLOTS}"):
            plan_gpu(spec, "bfloat16", record, free, Wanted(slots=asked))
    assert plan(spec, "bfloat16", record, free, Wanted(slots=36_864)).slots == 36_864
    assert plan_gpu(spec_of(8, 2), "bfloat16", record, free, Wanted(slots=MAX_SLOTS + 1)).slots == 16


def test_a_model_beyond_the_kernels_is_refused_on_a_gpu_alone() -> None:
    spec = spec_of(4097, 2)
    assert plan(spec, "bfloat16", record_of(spec), GB, Wanted()).slots
    with pytest.raises(ConfigError, match=r"4,097.*4,096.*--device cpu"):
        plan_gpu(spec, "bfloat16", record_of(spec), 10 * GB, Wanted())


@given(
    experts=st.integers(0, 600),
    per_token=st.integers(1, 33),
    free=st.integers(0, 20_000_000),
    slots=st.just(0) | st.integers(1, 2000),
    kv_tokens=st.just(0) | st.integers(1, 100_000),
    demand=st.booleans(),
    reserve=st.integers(0, 1_000_000),
)
def test_the_rules_hold_for_every_budget_of_a_gpu(
    experts: int, per_token: int, free: int, slots: int, kv_tokens: int, demand: bool, reserve: int
) -> None:
    if experts and per_token > experts:
        return
    spec = spec_of(experts, per_token)
    record = record_of(spec)
    try:
        budget = plan_gpu(spec, "bfloat16", record, free, Wanted(slots, kv_tokens, demand, 64), reserve)
    except ConfigError as error:
        assert "--" in str(error) and any(c.isdigit() for c in str(error))
        return
    parts = (budget.pool_nbytes, budget.kv_nbytes, budget.dense_nbytes, budget.workspace_nbytes, reserve)
    assert sum(parts) == budget.total_nbytes <= free
    assert budget.bank_nbytes == 2 * experts * record
    assert budget.pool_nbytes == (budget.slots + budget.stream_slots) * record
    assert least_slots(spec, demand) <= budget.slots <= 2 * experts
    if experts and not slots:
        assert budget.slots == 2 * experts or free - budget.total_nbytes < record
