"""plan: against sums written out by hand, and against the rules it promises, for arbitrary geometries."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyengine.budget import (
    ATTENTION_ROWS,
    Wanted,
    context_nbytes,
    dense_memory_nbytes,
    kv_token_nbytes,
    least_slots,
    plan,
    workspace_nbytes,
)
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.families import parse_spec
from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import ConfigError
from kernels.attention.ref import QUERY_BLOCK
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


def test_attention_over_the_whole_context() -> None:
    """By hand, for 2 heads and 1 KV head of 4: k and v of 3 heads, 512 rows of mask as bool and bfloat16."""
    spec = spec_of(8, 2, msgspec.structs.replace(TINY, max_position=1000))
    per_position = 2 * 3 * 4 * 2 + 512 * 3
    for kv_tokens, context in ((16, 16), (999, 999), (1000, 1000), (5000, 1000)):
        assert context_nbytes(spec, "bfloat16", Wanted(), kv_tokens) == context * per_position
    assert context_nbytes(spec, "bfloat16", Wanted(max_step_tokens=1), 16) == 16 * (2 * 3 * 4 * 2 + 3)
    step = Wanted(max_step_tokens=1)
    more = workspace_nbytes(spec, "bfloat16", step, 1000) - workspace_nbytes(spec, "bfloat16", step, 0)
    assert more == context_nbytes(spec, "bfloat16", step, 1000)


def test_every_running_sequence_has_a_row_of_logits() -> None:
    """Against V float32 values a row; the step itself is as large either way."""
    spec = spec_of(8, 2)
    one, many = (workspace_nbytes(spec, "bfloat16", Wanted(max_running=n), 16) for n in (1, 65))
    assert many - one == 64 * 4 * 10


def test_the_rows_of_attention_are_those_of_the_kernel() -> None:
    """Against the kernel's own constant, which this module must not import: it brings torch."""
    assert ATTENTION_ROWS == QUERY_BLOCK


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
