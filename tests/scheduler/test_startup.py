"""A scheduler's start with made-up workers: what they are asked for, what is derived, what a silent one costs."""

import logging
from pathlib import Path

import pytest
import zmq.asyncio
from msgspec.structs import replace

from copyengine.wire.errors import ConfigError, PeerTimeout
from scheduler import startup
from scheduler.config import SchedulerConfig
from scheduler.preflight import cut_tokens
from tests.scheduler.rig import engine, on_loop
from worker.protocol import Load


def test_a_dense_model_has_no_threshold_and_the_log_says_so_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Although there are two workers and the Ready facts, which say it too."""
    caplog.set_level(logging.INFO, "scheduler")

    async def main() -> None:
        async with engine(model, workers=2, facts={"moe_layers": 0}) as rig:
            config = SchedulerConfig(model=str(model), workers="")
            facts = startup.ready_facts(config, rig.service, [worker.facts for worker in rig.workers])
            assert facts["demand_tokens"] == rig.service.demand_tokens == 0
            assert sum("--demand-tokens" in line for line in caplog.messages) == 1

    on_loop("selector", main)


def test_the_facts_name_every_device_once(model: Path) -> None:
    async def main() -> None:
        async with engine(model, workers=3) as rig:
            config = SchedulerConfig(model=str(model), workers="")
            loaded = [replace(rig.worker.facts, device=device) for device in ("cuda:0 A", "cuda:1 B", "cuda:0 A")]
            assert startup.ready_facts(config, rig.service, loaded)["device"] == "cuda:0 A, cuda:1 B"

    on_loop("selector", main)


def test_workers_give_up_before_the_scheduler_does(model: Path) -> None:
    async def main() -> None:
        async with engine(model, ready_timeout_s=7.0) as rig:
            assert rig.worker.loads[0].deadline_s == 7.0 < 7.0 + startup.LOAD_MARGIN_S

    on_loop("selector", main)


def test_workers_are_asked_for_what_was_set(model: Path) -> None:
    """Against the settings, spelt out."""
    config = SchedulerConfig(
        model=str(model), workers="", load_format="dummy", slots=200, kv_tokens=64, max_running_requests=5,
        vram_reserve_bytes=3_000_000_000, token_embedding_placement="host", kv_placement="host",
        chunked_prefill_size=3, demand_tokens=0, state_slots=30, dtype="bfloat16", hf_overrides='{"a": 1}',
        ready_timeout_s=9.0, cache_policy="lrfu", collect_stats="stats.json",
    )  # fmt: skip
    assert startup.load_request(config) == Load(
        model=str(model), load_format="dummy", slots=200, kv_tokens=64, max_running=5, max_step_tokens=5,
        vram_reserve_nbytes=3_000_000_000, embedding_placement="host", kv_placement="host",
        demand_prefill=False, state_slots=30, dtype="bfloat16", hf_overrides='{"a": 1}', deadline_s=9.0,
        cache_policy="lrfu", log_routing=True,
    )  # fmt: skip
    auto = startup.load_request(SchedulerConfig(model=str(model), workers=""))
    assert (auto.load_format, auto.slots, auto.kv_tokens, auto.state_slots, auto.max_running) == ("auto", 0, 0, 0, 16)


def test_a_worker_that_is_not_there_is_given_up_and_the_setting_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "LOAD_MARGIN_S", 0.1)

    async def main() -> None:
        context = zmq.asyncio.Context()
        config = SchedulerConfig(model=str(model), workers="tcp://127.0.0.1:9", ready_timeout_s=0.1)
        with pytest.raises(
            PeerTimeout, match=r"no answer from the worker at .* within 0\.2 s; raise --ready-timeout-s"
        ):
            await startup.load_workers(context, config, lambda _: None)
        context.term()

    on_loop("selector", main)


@pytest.mark.parametrize("asked", [False, True])
def test_a_worker_that_computes_otherwise_than_the_scheduler_cuts_is_refused(model: Path, asked: bool) -> None:
    async def main() -> None:
        which = "this scheduler" if asked else "the worker"
        with pytest.raises(ConfigError, match=f"--deterministic: only {which} was started with it"):
            async with engine(model, deterministic=asked, facts={"deterministic": not asked}):
                pass
        async with engine(model, deterministic=asked, facts={"deterministic": asked}):
            pass

    on_loop("selector", main)


@pytest.mark.parametrize(
    ("deterministic", "state_slots", "cut_tokens"), [(True, 9, 64), (True, 0, None), (False, 9, None)]
)
def test_only_prompts_of_recurrent_models_whose_answers_are_to_repeat_are_cut_at_multiples(
    model: Path, deterministic: bool, state_slots: int, cut_tokens: int | None
) -> None:
    async def main() -> None:
        facts = {"deterministic": deterministic, "state_slots": state_slots}
        async with engine(model, deterministic=deterministic, facts=facts, max_running_requests=4) as rig:
            assert rig.service.lanes[0].core.limits.cut_tokens == cut_tokens

    on_loop("selector", main)


def test_chunks_that_hold_no_multiple_are_refused() -> None:
    """63 of 64 tokens, where it matters."""
    config = SchedulerConfig(model="m", workers="", deterministic=True, chunked_prefill_size=63)
    with pytest.raises(ConfigError, match=r"--chunked-prefill-size 63: .* use 64 or more"):
        cut_tokens(config, recurrent=True)
    assert cut_tokens(config, recurrent=False) is None
    assert cut_tokens(replace(config, chunked_prefill_size=64), recurrent=True) == 64
    assert cut_tokens(replace(config, deterministic=False), recurrent=True) is None


@pytest.mark.parametrize("workers", ["foo", "tcp://127.0.0.1:9,foo"])
def test_a_worker_endpoint_that_is_none_is_refused_and_nothing_stays_open(model: Path, workers: str) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        with pytest.raises(ConfigError, match="'foo'"):
            await startup.load_workers(context, SchedulerConfig(model=str(model), workers=workers), lambda _: None)
        context.term()

    on_loop("selector", main)
