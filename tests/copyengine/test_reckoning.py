"""reckon, reckon_gpu: against sums written out by hand, and against their rules, for arbitrary geometries."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyengine.budget import (
    Budget,
    MemoryPlacement,
    Wanted,
    dense_memory_nbytes,
    embedding_nbytes,
    kv_token_nbytes,
    least_slots,
)
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.families import parse_spec
from copyengine.gpu_limits import MAX_SLOTS
from copyengine.model_spec import ModelSpec
from copyengine.reckoning import reckon, reckon_gpu
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from tests.copyengine.budget_specs import (
    GB,
    NVFP4_RECORD,
    STATE_NBYTES,
    TINY,
    flash_next,
    record_of,
    spec_of,
    with_state,
)


def test_the_built_in_model() -> None:
    """By hand: 2 x 4 x 32 x 8 KV elements a token; 8 x 64 experts of 196,608 bytes."""
    spec = parse_spec(model_config(Sizes()))
    budget = reckon(spec, "bfloat16", record_of(spec), 16 * GB, Wanted())
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
    assert reckon(spec, "bfloat16", record_of(spec), GB, wanted).slots == least
    if least > 1:
        with pytest.raises(ConfigError, match=rf"--slots {least - 1} .*{least}.*use --slots {least}"):
            reckon(spec, "bfloat16", record_of(spec), GB, Wanted(slots=least - 1, demand_prefill=demand))


def test_a_refused_pool_names_the_other_way_out() -> None:
    spec = spec_of(512, 10)
    with pytest.raises(ConfigError, match="--demand-tokens 0 with --slots 10"):
        reckon(spec, "bfloat16", record_of(spec), GB, Wanted(slots=100))


def test_too_many_slots_are_capped_with_a_note() -> None:
    spec = spec_of(8, 2)
    for wanted, got, notes in ((16, 16, 0), (17, 16, 1), (10**9, 16, 1)):
        budget = reckon(spec, "bfloat16", record_of(spec), GB, Wanted(slots=wanted))
        assert (budget.slots, len(budget.notes)) == (got, notes)


def test_a_dense_model_has_no_slots() -> None:
    spec = spec_of(0, 1)
    budget = reckon(spec, "float32", 0, GB, Wanted())
    assert (budget.slots, budget.stream_slots, budget.bank_nbytes, budget.pool_nbytes) == (0, 0, 0, 0)
    with pytest.raises(ConfigError, match=r"--slots 5: a dense model .*leave --slots out"):
        reckon(spec, "float32", 0, GB, Wanted(slots=5))


def test_kv_pages() -> None:
    spec = spec_of(8, 2)
    for asked, got in ((1, 16), (15, 16), (16, 16), (17, 32)):
        budget = reckon(spec, "bfloat16", record_of(spec), GB, Wanted(kv_tokens=asked))
        assert budget.kv_tokens == got and bool(budget.notes) == (asked != got)


def test_flash_next_on_a_gpu_of_16_gb() -> None:
    """By hand, from the geometry: 24,576 experts of 2,765,056 bytes in host memory; the GPU takes what fits of them."""
    spec, free = flash_next(), 16_000_000_000
    record = record_layout(spec, "bfloat16")
    assert record is not None
    budget = reckon_gpu(spec, "bfloat16", record.record_nbytes, free, Wanted(max_running=16))
    assert budget.bank_nbytes == 24_576 * NVFP4_RECORD
    # embed + head, final norm, and per layer: norms, router, q + o, k + v, q/k norms
    layer = 2 * 2560 + 512 * 2560 + 2 * 6144 * 2560 + 2 * 512 * 2560 + 2 * 256
    assert budget.dense_nbytes == 2 * (2 * 248_320 * 2560 + 2560 + 48 * layer)
    assert budget.kv_nbytes == budget.kv_tokens * 48 * 2 * 2 * 256 * 2
    assert (budget.query_experts, budget.stream_groups, budget.stream_slots) == (64, 8, 512)
    # 4,096 rows, 1.25 times: 4 x H, router's logits, 10 routes of H + I and 3 words, angles of 256 as float32;
    # cuBLAS; 16 rows of logits, twice, 4 changed
    step = 5120 * (2 * (4 * 2560 + 512 + 10 * 3200) + 120 + 8 * 256) + (32 << 20) + (32 * 6 + 4 * 50) * 248_320
    step += 32 * (65_536 * 8 + 243 * (32 * 12 + 20))  # to draw from
    assert budget.workspace_nbytes == step
    assert budget.slots >= 1000 and budget.kv_tokens >= 8192
    page = 16 * 48 * 2 * 2 * 256 * 2
    assert free - record.record_nbytes - page < budget.total_nbytes <= free


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_quantised_experts_are_bfloat16_on_a_gpu(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"--dtype {dtype}: nvfp4 .*--dtype bfloat16"):
        reckon_gpu(flash_next(), dtype, NVFP4_RECORD, 140 * GB, Wanted())


def test_a_gpu_gets_no_more_slots_than_its_kernels_take() -> None:
    """Auto stops there; a larger --slots is refused, unless the model's experts are fewer. On the host none is."""
    spec, free = spec_of(4096, 2, msgspec.structs.replace(TINY, layers=9)), 100 * GB  # 36,864 experts
    record = record_of(spec)
    for asked in (0, MAX_SLOTS - 1, MAX_SLOTS):
        assert reckon_gpu(spec, "bfloat16", record, free, Wanted(slots=asked)).slots == (asked or MAX_SLOTS)
    for asked in (MAX_SLOTS + 1, 36_864, 10**9):
        with pytest.raises(ConfigError, match=rf"--slots {asked} .*{MAX_SLOTS}"):
            reckon_gpu(spec, "bfloat16", record, free, Wanted(slots=asked))
    assert reckon(spec, "bfloat16", record, free, Wanted(slots=36_864)).slots == 36_864
    assert reckon_gpu(spec_of(8, 2), "bfloat16", record, free, Wanted(slots=MAX_SLOTS + 1)).slots == 16


def test_a_model_beyond_the_kernels_is_refused_on_a_gpu_alone() -> None:
    spec = spec_of(4097, 2)
    assert reckon(spec, "bfloat16", record_of(spec), GB, Wanted()).slots
    with pytest.raises(ConfigError, match=r"4,097.*4,096.*--device cpu"):
        reckon_gpu(spec, "bfloat16", record_of(spec), 10 * GB, Wanted())


sizes = st.fixed_dictionaries(
    {
        "slots": st.just(0) | st.integers(1, 2000),
        "kv_tokens": st.just(0) | st.integers(1, 100_000),
        "demand_prefill": st.booleans(),
        "max_step_tokens": st.integers(1, 8192),
        "page_tokens": st.integers(1, 64),
        "embedding_placement": st.sampled_from(["device", "host"]),
        "kv_placement": st.sampled_from(["device", "host"]),
    }
)


@given(
    experts=st.integers(0, 600),
    per_token=st.integers(1, 32),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    on_gpu=st.booleans(),
    available=st.integers(0, 20_000_000),
    more=st.integers(0, 1000) | st.integers(0, 20_000_000),
    reserve=st.integers(0, 1_000_000),
    asked=sizes,
)
def test_the_rules_hold_for_every_budget(
    experts: int,
    per_token: int,
    dtype: str,
    on_gpu: bool,
    available: int,
    more: int,
    reserve: int,
    asked: dict[str, Any],
) -> None:
    """The parts are all and add up, what is asked for comes out, only what cannot be smaller is over what there is, and
    with more memory no size is smaller."""
    spec, wanted = spec_of(max(experts, per_token) if experts else 0, per_token), Wanted(**asked)

    def budget_of(nbytes: int) -> Budget:
        record = record_of(spec, dtype)
        if on_gpu:
            return reckon_gpu(spec, dtype, record, nbytes, wanted, reserve, nbytes // 2)
        return reckon(spec, dtype, record, nbytes, wanted)

    try:
        budget = budget_of(available)
    except ConfigError as error:
        assert "--" in str(error) and any(c.isdigit() for c in str(error))
        with pytest.raises(ConfigError):
            budget_of(available + more)
        return
    kv_pinned, embedding_pinned = (on_gpu and placed == "host" for placed in placements(wanted))
    embedding = embedding_nbytes(spec, dtype) if embedding_pinned else 0
    here = budget.dense_nbytes - embedding + budget.pool_nbytes + budget.workspace_nbytes
    here += reserve if on_gpu else budget.bank_nbytes
    assert sum(part.nbytes for part in budget.parts) == budget.total_nbytes == here + (not kv_pinned) * budget.kv_nbytes
    assert budget.pinned_nbytes == kv_pinned * budget.kv_nbytes + embedding
    check_sizes(budget, spec, dtype, wanted)
    least = min(wanted.slots, 2 * experts_of(spec)) or least_slots(spec, wanted.demand_prefill)
    if budget.total_nbytes > available:
        assert budget.slots == least
        assert wanted.kv_tokens or kv_pinned or budget.kv_tokens == wanted.page_tokens
    elif on_gpu and spec.moe and not wanted.slots:
        page = wanted.page_tokens * kv_token_nbytes(spec, dtype)
        filled = available - budget.total_nbytes < record_of(spec, dtype) + page
        assert budget.slots == 2 * experts_of(spec) or filled
    larger = budget_of(available + more)
    assert larger.slots >= budget.slots and larger.kv_tokens >= budget.kv_tokens
    assert larger.total_nbytes - available - more <= max(0, budget.total_nbytes - available)


def placements(wanted: Wanted) -> tuple[MemoryPlacement, MemoryPlacement]:
    return wanted.kv_placement, wanted.embedding_placement


def experts_of(spec: ModelSpec) -> int:
    return spec.moe.experts if spec.moe else 0


def check_sizes(budget: Budget, spec: ModelSpec, dtype: str, wanted: Wanted) -> None:
    record, experts = record_of(spec, dtype), experts_of(spec)
    assert budget.bank_nbytes == 2 * experts * record
    assert budget.pool_nbytes == (budget.slots + budget.stream_slots) * record
    assert budget.kv_tokens % wanted.page_tokens == 0 and budget.kv_tokens >= max(wanted.page_tokens, wanted.kv_tokens)
    assert budget.kv_nbytes == budget.kv_tokens * kv_token_nbytes(spec, dtype)
    assert budget.dense_nbytes == dense_memory_nbytes(spec, dtype)
    assert least_slots(spec, wanted.demand_prefill) <= budget.slots <= 2 * experts
    if wanted.slots and experts:
        assert budget.slots == min(wanted.slots, 2 * experts)


@pytest.mark.parametrize(("running", "cache", "slots"), [(1, True, 17), (16, True, 32), (16, False, 16)])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_automatic_state_slots_are_one_for_each_request_and_some_for_snapshots(
    running: int, cache: bool, slots: int, on_gpu: bool
) -> None:
    spec, wanted = with_state(spec_of(8, 2)), Wanted(max_running=running, prefix_cache=cache)
    record = record_of(spec)
    budget = (reckon_gpu if on_gpu else reckon)(spec, "bfloat16", record, 10 * GB, wanted)
    assert (budget.state_slots, budget.state_nbytes) == (slots, slots * STATE_NBYTES)
    (part,) = [part for part in budget.parts if part.name == f"recurrent states ({slots})"]
    assert part.nbytes == budget.state_nbytes


def test_state_slots_that_are_asked_for() -> None:
    """As many as that, at least one for each request, and none for a model without a state."""
    spec, record = with_state(spec_of(8, 2)), record_of(spec_of(8, 2))
    for asked in (16, 17, 1000):
        assert reckon(spec, "bfloat16", record, GB, Wanted(max_running=16, state_slots=asked)).state_slots == asked
    with pytest.raises(ConfigError, match=r"--state-slots 15 .*--state-slots 16 .*--max-running-requests 15"):
        reckon(spec, "bfloat16", record, GB, Wanted(max_running=16, state_slots=15))
    with pytest.raises(ConfigError, match=r"--state-slots 20: .*no recurrent state; leave --state-slots out"):
        reckon(spec_of(8, 2), "bfloat16", record, GB, Wanted(state_slots=20))


@given(
    running=st.integers(1, 40),
    asked=st.just(0) | st.integers(40, 60),
    kv_tokens=st.just(0) | st.integers(1, 1000),
    available=st.integers(0, 3_000_000),
    more=st.integers(0, 2000) | st.integers(0, 1_000_000),
    on_gpu=st.booleans(),
)
def test_states_take_their_part_and_with_more_memory_nothing_is_less(
    running: int, asked: int, kv_tokens: int, available: int, more: int, on_gpu: bool
) -> None:
    """Fewer snapshots than wanted are planned only if they would take more than their share."""
    spec = with_state(spec_of(64, 2))
    wanted = Wanted(kv_tokens=kv_tokens, max_step_tokens=8, max_running=running, state_slots=asked)

    def budget_of(nbytes: int) -> Budget:
        if on_gpu:
            return reckon_gpu(spec, "bfloat16", record_of(spec), nbytes, wanted, 1000)
        return reckon(spec, "bfloat16", record_of(spec), nbytes, wanted)

    budget, larger = budget_of(available), budget_of(available + more)
    assert budget.state_nbytes == budget.state_slots * STATE_NBYTES
    for each in (budget, larger):
        assert each.total_nbytes == sum(part.nbytes for part in each.parts)
        assert each.state_slots == asked if asked else running <= each.state_slots <= running + 16
    if budget.total_nbytes > available:
        assert budget.state_slots == (asked or running)
    assert larger.state_slots >= budget.state_slots
    assert larger.slots >= budget.slots and larger.kv_tokens >= budget.kv_tokens


def test_automatic_slots_of_the_host_are_a_quarter_of_the_experts() -> None:
    """Or what a demand chunk needs, if that is more."""
    for experts, slots in ((600, 300), (8, 8), (1, 1), (300, 150)):
        spec = spec_of(experts, 1)
        assert reckon(spec, "bfloat16", record_of(spec), GB, Wanted()).slots == slots


def test_a_tied_embedding_stays_on_the_gpu() -> None:
    """It is the head too; on the host it makes no difference, which a note says."""
    spec = msgspec.structs.replace(flash_next(), tie_word_embeddings=True)
    wanted = Wanted(embedding_placement="host", kv_placement="host")
    with pytest.raises(ConfigError, match=r"--token-embedding-placement host: .*--token-embedding-placement device"):
        reckon_gpu(spec, "bfloat16", NVFP4_RECORD, 140 * GB, wanted, host_nbytes=140 * GB)
    budget = reckon(spec, "bfloat16", NVFP4_RECORD, 140 * GB, wanted)
    assert budget.pinned == () and [note.split(":")[0] for note in budget.notes] == [
        "--token-embedding-placement host",
        "--kv-placement host",
    ]


def test_what_is_to_stay_free_on_a_gpu_is_said_to_mean_nothing_on_the_host() -> None:
    """Against the budget without it, which is the same but for the note."""
    spec = spec_of(8, 1)
    plain, asked = (reckon(spec, "bfloat16", record_of(spec), GB, Wanted(vram_reserve_nbytes=n)) for n in (0, 3 * GB))
    assert asked.notes == (*plain.notes, "--vram-reserve-bytes 3000000000: there is no GPU to leave it free on")
    assert msgspec.structs.replace(asked, notes=plain.notes) == plain


def test_what_lies_in_host_memory_leaves_room_for_slots() -> None:
    """By hand: the embedding of Flash-Next and its KV make way for experts; automatic KV is a quarter of the host's."""
    spec, record = flash_next(), NVFP4_RECORD
    wanted = Wanted(kv_tokens=16_384)
    here = reckon_gpu(spec, "bfloat16", record, 16 * GB, wanted)
    there = reckon_gpu(
        spec,
        "bfloat16",
        record,
        16 * GB,
        msgspec.structs.replace(wanted, embedding_placement="host", kv_placement="host"),
    )
    embedding, kv = 248_320 * 2560 * 2, 16_384 * 48 * 2 * 2 * 256 * 2
    assert [part.nbytes for part in there.pinned] == [embedding, kv] and here.pinned == ()
    assert 0 <= (there.slots - here.slots) * record - embedding - kv + record <= 2 * record
    auto = reckon_gpu(spec, "bfloat16", record, 16 * GB, Wanted(kv_placement="host"), host_nbytes=4 * GB)
    assert auto.kv_tokens == GB // (48 * 2 * 2 * 256 * 2) // 16 * 16
