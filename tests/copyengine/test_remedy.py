"""What a refusal says to change: it fits, and one step less of a change does not."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from copyengine.budget import Wanted
from copyengine.planning import FreeGpu, Plan
from tests.copyengine.budget_specs import GB, NVFP4_RECORD, flash_next, with_state

FIELDS = {
    "--slots": ("slots", 1),
    "--kv-tokens": ("kv_tokens", 16),
    "--chunked-prefill-size": ("max_step_tokens", 1),
    "--max-running-requests": ("max_running", 1),
    "--state-slots": ("state_slots", 1),
    "--vram-reserve-bytes": ("vram_reserve_nbytes", 1),
    "--workers": ("workers", 1),
}
SPEC = flash_next(num_hidden_layers=2)
PLACEMENTS = {"--token-embedding-placement": "embedding_placement", "--kv-placement": "kv_placement"}


def fixed(words: str, wanted: Wanted) -> tuple[Wanted, Wanted | None]:
    """`wanted` as the message says, and with one step less of the change if that is a number."""
    placed = re.search(r"; use (--[a-z-]+placement) (host|device), or free", words)
    if placed:
        return replace(wanted, **{PLACEMENTS[placed[1]]: placed[2]}), None
    numbers = re.findall(r"(--[a-z-]+) (\d+) \(now (\d+)\)", words)
    assert numbers, words
    less: Wanted | None = None
    changed = wanted
    for flag, value, now in numbers:
        field, step = FIELDS[flag]
        assert int(value) <= int(now) == getattr(wanted, field)
        changed = replace(changed, **{field: int(value)})
        less = replace(wanted, **{field: int(value) + step}) if len(numbers) == 1 else None
    return changed, less


@given(
    free=st.integers(4 * GB, 16 * GB),
    slots=st.just(0) | st.integers(128, 1024),
    kv_pages=st.just(0) | st.integers(1, 1 << 16),
    step=st.integers(1, 1 << 16),
    running=st.integers(1, 600),
    reserve=st.just(0) | st.integers(2 << 30, 8 << 30),
    workers=st.integers(1, 4),
    on_gpus=st.booleans(),
)
def test_the_change_is_enough_and_no_larger_than_needed(
    free: int, slots: int, kv_pages: int, step: int, running: int, reserve: int, workers: int, on_gpus: bool
) -> None:
    """On GPUs of which all but the first have more room and less, and on the host, where workers share what is free."""
    wanted = Wanted(slots, 16 * kv_pages, True, step, 16, running, reserve, workers=workers)
    if on_gpus:
        gpus = tuple(FreeGpu(f"cuda:{i} X", free + i * (-1) ** i * GB) for i in range(workers))
        plan = Plan(SPEC, "bfloat16", NVFP4_RECORD, 128 * GB, gpus)
    else:
        plan = Plan(SPEC, "bfloat16", NVFP4_RECORD, 2 * free)
    survey = plan.survey(wanted)
    words = plan.refusal(survey, wanted)
    assert bool(words) == (survey.short_nbytes > 0)
    if not words or "cannot be made smaller" in words or "--demand-tokens 0" in words:
        return
    changed, less = fixed(words, wanted)
    assert plan.survey(changed).short_nbytes <= 0
    assert on_gpus or "--vram-reserve-bytes" not in words, "it takes nothing there"
    if less is not None and less != wanted:
        assert plan.survey(less).short_nbytes > 0


def test_state_slots_beside_those_of_running_requests_can_be_fewer() -> None:
    """A state of 1,000 bytes: a million more than the requests' are 1 GB."""
    plan = Plan(with_state(SPEC), "bfloat16", NVFP4_RECORD, 128 * GB, (FreeGpu("X", 8 * GB),))
    wanted = Wanted(kv_tokens=16, max_step_tokens=64, max_running=4, state_slots=3_000_000)
    words = plan.refusal(plan.survey(wanted), wanted)
    assert "recurrent states (3000000) 3,000 MB" in words
    changed, less = fixed(words, wanted)
    assert less is not None and 4 < changed.state_slots < 3_000_000
    assert plan.survey(changed).short_nbytes <= 0 < plan.survey(less).short_nbytes


@pytest.mark.parametrize(
    ("free", "wanted", "words"),
    [
        (
            6_200_000_000,
            Wanted(),
            "use --token-embedding-placement host",
        ),  # as small as it gets: the embedding is 1.3 GB
        (5 * GB, Wanted(kv_tokens=16, max_step_tokens=1), "give a smaller --model"),
        (5_300_000_000, Wanted(kv_tokens=16, max_step_tokens=1, embedding_placement="host"), "use --demand-tokens 0"),
        (16 * GB, Wanted(slots=1000, kv_tokens=3_000_000), "use --kv-tokens"),
        (9 * GB, Wanted(slots=1024, max_running=1), "use --slots"),
    ],
)
def test_which_setting_is_named(free: int, wanted: Wanted, words: str) -> None:
    """Against sums of two layers: dense weights 2.7 GB, stream slots 1.4 GB, what stays free 2.1 GB."""
    plan = Plan(SPEC, "bfloat16", NVFP4_RECORD, 128 * GB, (FreeGpu("X", free),))
    assert words in plan.refusal(plan.survey(wanted), wanted)
