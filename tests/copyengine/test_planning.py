"""Plan: against sums written out by hand, and round trips of what it says."""

import msgspec
import pytest

from copyengine.budget import GPU_CONTEXTS_NBYTES, GPU_RESERVE_NBYTES, HOST_RESERVE_NBYTES, Wanted
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.families import parse_spec
from copyengine.model_spec import ModelSpec
from copyengine.planning import FreeGpu, Plan
from copyengine.wire.errors import ConfigError
from tests.copyengine.budget_specs import GB, NVFP4_RECORD, flash_next, record_of, spec_of


def plan_of(spec: ModelSpec, host_nbytes: int, dtype: str = "bfloat16") -> Plan:
    return Plan(spec, dtype, record_of(spec, dtype), host_nbytes)


def flash_next_on(*free_nbytes: int, host_nbytes: int = 128 * GB, started: bool = False) -> Plan:
    gpus = tuple(FreeGpu(f"cuda:{i} X", free) for i, free in enumerate(free_nbytes))
    return Plan(flash_next(), "bfloat16", NVFP4_RECORD, host_nbytes, gpus, started)


def test_too_little_memory_names_both_numbers_and_the_flag() -> None:
    spec = parse_spec(model_config(Sizes()))
    for wanted, flag in (
        (Wanted(kv_tokens=10**6, max_step_tokens=64), "--kv-tokens"),
        (Wanted(slots=512, max_step_tokens=64, kv_tokens=16), "--slots"),
        (Wanted(max_step_tokens=10**6), "--chunked-prefill-size"),
        (Wanted(max_running=10**6, max_step_tokens=64), "--max-running-requests"),
    ):
        with pytest.raises(ConfigError, match=rf"needed.*200 MB available; use {flag} "):
            plan_of(spec, 200 * 10**6).settled(wanted)
    sizes = Sizes(layers=1, experts=0, heads=32, kv_heads=32, max_position=10**6)
    with pytest.raises(ConfigError, match="use --kv-tokens"):  # KV 41 MB, its heads gathered 97 MB, the step 84 MB
        plan_of(parse_spec(model_config(sizes)), 120 * 10**6).settled(Wanted(kv_tokens=10_000))
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        plan_of(spec, 50 * 10**6, "float32").settled(Wanted())


@pytest.mark.parametrize("slots", [0, 2100, 24_576, 30_000])
def test_what_launch_planned_fits_the_worker_that_is_told_it(slots: int) -> None:
    """Round trip: the sizes that come out, asked for by name, give the same budget, at the same free memory or more,
    and once the contexts have theirs."""
    wanted = Wanted(slots=slots, max_running=4)
    budget = flash_next_on(140 * GB).settled(wanted)
    assert budget.slots == min(slots or 24_576, 24_576) and len(budget.notes) == (slots > 24_576)
    again = msgspec.structs.replace(wanted, slots=budget.slots, kv_tokens=budget.kv_tokens)
    for free in (budget.total_nbytes, 140 * GB):
        told = flash_next_on(free).settled(again)
        assert msgspec.structs.replace(told, notes=budget.notes) == budget
    with pytest.raises(ConfigError, match="use --"):
        flash_next_on(budget.total_nbytes - 1).settled(again)
    left = budget.total_nbytes - GPU_CONTEXTS_NBYTES
    started = flash_next_on(left, host_nbytes=1, started=True).settled(again)
    assert (started.slots, started.kv_tokens, started.total_nbytes) == (budget.slots, budget.kv_tokens, left)
    assert started.reserve_nbytes == GPU_RESERVE_NBYTES - GPU_CONTEXTS_NBYTES


def test_too_little_gpu_memory_names_the_gpu_both_numbers_and_the_flag() -> None:
    for wanted, free, words in (
        (Wanted(), 4 * GB, r"memory of cuda:0 X: .* needed .*to stay free.*, 4,000 MB available; what cannot be made"),
        (Wanted(slots=5000), 16 * GB, r"slot pool \(5000 \+ 512\).*16,000 MB available; use --slots \d+ \(now 5000\)"),
        (Wanted(kv_tokens=200_000), 16 * GB, r"use --kv-tokens \d+ \(now 200000\)"),
        (Wanted(max_step_tokens=65536, kv_tokens=16), 16 * GB, r"use --chunked-prefill-size"),
        (Wanted(vram_reserve_nbytes=12 * GB), 16 * GB, r"to stay free 12,000 MB.* use --vram-reserve-bytes \d+"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            flash_next_on(free).settled(wanted)
        assert "banks" not in str(caught.value)


def test_banks_leave_host_memory_for_the_processes() -> None:
    """Against the sum by hand, a byte under and over, for one worker and for eight, with what they have there too."""
    spec = flash_next(num_hidden_layers=2)
    banks, embedding, kv = 2 * 512 * NVFP4_RECORD, 248_320 * 2560 * 2, 16 * 2 * 2 * 2 * 256 * 2
    for workers, placed, own in ((1, "device", 0), (8, "device", 0), (8, "host", embedding + kv)):
        needed = banks + (1 + workers) * HOST_RESERVE_NBYTES + workers * own
        gpus = (FreeGpu("cuda:0 X", 140 * GB),) * workers
        wanted = Wanted(kv_tokens=16, workers=workers, embedding_placement=placed, kv_placement=placed)  # type: ignore[arg-type]
        assert Plan(spec, "bfloat16", NVFP4_RECORD, needed, gpus).settled(wanted).bank_nbytes == banks
        with pytest.raises(
            ConfigError, match=r"host memory: \d+,\d+ MB needed .*pinned expert banks 2,832 MB, .*free 1 MB$"
        ):
            Plan(spec, "bfloat16", NVFP4_RECORD, needed - 1, gpus).settled(wanted)
    dense = spec_of(0, 1)
    assert Plan(dense, "bfloat16", 0, 0, (FreeGpu("cuda:0 X", 10 * GB),)).settled(Wanted()).bank_nbytes == 0


def test_a_worker_that_has_started_does_not_reserve_for_its_process_again() -> None:
    """With the banks in memory and 2 GiB taken by processes, what launch planned just fits."""
    wanted = Wanted(kv_tokens=1 << 16, kv_placement="host")
    plan = flash_next_on(140 * GB)
    (host, _) = plan.survey(wanted).needs
    flash_next_on(140 * GB, host_nbytes=host.total_nbytes).settled(wanted)
    left = host.total_nbytes - plan.settled(wanted).bank_nbytes - HOST_RESERVE_NBYTES
    assert flash_next_on(140 * GB, host_nbytes=left, started=True).settled(wanted).pinned_nbytes > GB
    with pytest.raises(ConfigError, match="host memory"):
        flash_next_on(140 * GB, host_nbytes=left - 1, started=True).settled(wanted)


def test_the_banks_are_there_once_and_all_else_once_per_worker() -> None:
    """On the host: against the sum of the parts of one worker's budget."""
    spec = parse_spec(model_config(Sizes()))
    wanted = Wanted(slots=128, kv_tokens=256, workers=3)
    one = plan_of(spec, GB).settled(msgspec.structs.replace(wanted, workers=1))
    needed = one.bank_nbytes + 3 * (one.total_nbytes - one.bank_nbytes)
    assert plan_of(spec, needed).settled(wanted) == one
    with pytest.raises(ConfigError, match=r"3 x slot pool"):
        plan_of(spec, needed - 1).settled(wanted)


def test_the_fullest_gpu_decides() -> None:
    budget = flash_next_on(140 * GB, 16 * GB).settled(Wanted(workers=2))
    assert budget == flash_next_on(16 * GB).settled(Wanted())
    with pytest.raises(ConfigError, match="memory of cuda:1 X"):
        flash_next_on(140 * GB, 16 * GB).settled(Wanted(workers=2, slots=6000))
