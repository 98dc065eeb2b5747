"""/metrics against times of a made-up clock, the engine's own counters and Prometheus' parser."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from scheduler.client import Client
from scheduler.http.answering import Observer
from scheduler.http.looking import Look, look
from scheduler.http.metrics import LONG_S, Metrics
from scheduler.protocol import Choice, HealthReply, ModeCounters, Sampling, StatsReply, Timing, Usage
from tests.scheduler.rig import RECORD_NBYTES, engine, on_loop

NOBODY = "tcp://127.0.0.1:9"  # the port "discard", which nobody listens on here

AS_VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
}
OF_OFFLOADING = {
    "expert_hits": "counter",
    "expert_misses": "counter",
    "copied_bytes": "counter",
    "chunks": "counter",
    "decode_steps": "counter",
    "copy_wait_seconds": "counter",
    "step_seconds": "counter",
    "slots": "gauge",
    "stream_slots": "gauge",
    "pinned_bytes": "gauge",
    "bank_bytes": "gauge",
    "restarts": "counter",
    "failed_steps": "counter",
    "slots_resident": "gauge",
    "dropped_frames": "counter",
    "requests_finished": "counter",
    "requests_failed": "counter",
    "requests_not_finite": "counter",
    "requests_aborted": "counter",
    "requests_refused": "counter",
    "http_requests_refused": "counter",
    "worker_up": "gauge",
    "engine_up": "gauge",
    "engine_ready": "gauge",
}


class Clock:
    """Stands still unless it is put forward."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def families(text: bytes) -> dict[str, Metric]:
    """By name without our prefix, which all have."""
    found = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert all(name.startswith("slotstream:") for name in found)
    return {name.removeprefix("slotstream:"): family for name, family in found.items()}


def value(found: dict[str, Metric], name: str, **labels: str) -> float:
    """The sum of the samples of counter or gauge `name` that have `labels`."""
    return sum(sample.value for sample in matching(found[name].samples, labels))


def matching(samples: Iterable[Sample], labels: dict[str, str]) -> list[Sample]:
    return [sample for sample in samples if labels.items() <= sample.labels.items()]


def histogram(found: dict[str, Metric], name: str) -> tuple[float, float, list[float]]:
    """Count, sum, and the bounds up to which there is nothing more than below the bound before."""
    samples = {sample.name.removeprefix(f"slotstream:{name}"): sample.value for sample in found[name].samples}
    buckets = [sample for sample in found[name].samples if sample.name.endswith("_bucket")]
    before, filled = 0.0, []
    for sample in buckets:
        filled += [float(sample.labels["le"])] * int(sample.value - before)
        before = sample.value
    return samples["_count"], samples["_sum"], filled


def end(reason: str, queued_s: float) -> Choice:
    return Choice(reason, Usage(*[0] * 8), Timing(queued_s, 0, 0, 0))  # type: ignore[arg-type]


def test_times_are_those_of_the_clock() -> None:
    clock = Clock()
    metrics = Metrics("m", clock)
    observer: Observer = metrics.observe()
    observer.began(7)
    for seconds, tokens in [(1.5, 1), (0.03, 1), (1.0, 0), (1.0, 4)]:  # the third is text that was held back
        clock.now_s += seconds
        observer.token(tokens)
    clock.now_s += 30
    observer.ended("stop", end("stop", 0.25))

    found = families(metrics.text(Look()))
    assert histogram(found, "time_to_first_token_seconds") == (1, 1.5, [2])
    count, total, filled = histogram(found, "inter_token_latency_seconds")
    assert (count, filled) == (5, [0.05, *[0.5] * 4]) and total == pytest.approx(2.03)
    count, total, filled = histogram(found, "e2e_request_latency_seconds")
    assert (count, filled) == (1, [50]) and total == pytest.approx(33.53)
    assert histogram(found, "request_queue_time_seconds") == (1, 0.25, [0.5])


def test_ends_are_counted_by_their_reason_and_only_whole_answers_are_timed() -> None:
    metrics = Metrics("m", Clock())
    for reason in ("stop", "length", "length", "abort", "error"):
        observer = metrics.observe()
        observer.began(1)
        observer.ended(reason, end(reason, 0.1) if reason in ("stop", "length") else None)

    found = families(metrics.text(Look()))
    told = {sample.labels["finished_reason"]: sample.value for sample in found["request_success"].samples}
    assert told == {"stop": 1, "length": 2, "abort": 1}
    assert histogram(found, "e2e_request_latency_seconds")[0] == 3
    assert histogram(found, "time_to_first_token_seconds")[0] == 0, "there was no token"


def test_a_histogram_for_the_page_has_each_bounds_own_count() -> None:
    clock = Clock()
    metrics = Metrics("m", clock)
    for seconds in (0.004, 0.15, 0.2, 2000.0):
        clock.now_s = 0.0
        observer = metrics.observe()
        observer.began(1)
        clock.now_s += seconds
        observer.token(1)
    spread = metrics.first_tokens()
    assert spread.bounds == list(LONG_S) and len(spread.counts) == len(LONG_S) + 1
    assert {bound: many for bound, many in zip([*LONG_S, "over"], spread.counts, strict=True) if many} == {
        0.005: 1,
        0.2: 2,
        "over": 1,
    }


def test_an_engine_that_does_not_answer_leaves_the_fronts_own_figures() -> None:
    metrics = Metrics("m", Clock())
    found = families(metrics.text(Look()))
    assert (value(found, "engine_up"), value(found, "engine_ready")) == (0, 0)
    own = {name for name, kind in AS_VLLM.items() if kind == "histogram"} | {"request_success"}
    assert set(found) == own | {"engine_up", "engine_ready", "http_requests_refused"}

    loading = Look(HealthReply(False, "loading", "m"), StatsReply(**nothing()))
    found = families(metrics.text(loading))
    assert (value(found, "engine_up"), value(found, "engine_ready")) == (1, 0)
    assert set(found) == set(AS_VLLM | OF_OFFLOADING)


def nothing() -> dict[str, Any]:
    """Arguments of the StatsReply of an engine that loads."""
    none: dict[str, Any] = dict.fromkeys(StatsReply.__struct_fields__, 0)
    return none | {"workers": [], "decode": ModeCounters(), "demand": ModeCounters(), "streamed": ModeCounters()}


def test_a_models_name_may_hold_anything() -> None:
    name = 'Qwen/3 "é" \\ \n {x}'
    found = families(Metrics(name, Clock()).text(Look()))
    assert {sample.labels["model_name"] for family in found.values() for sample in family.samples} == {name}


def test_two_fronts_share_nothing() -> None:
    one, two = Metrics("m", Clock()), Metrics("m", Clock())
    one.observe().ended("stop", None)
    assert value(families(one.text(Look())), "request_success") == 1
    assert value(families(two.text(Look())), "request_success") == 0


def test_what_the_engine_says_is_what_its_client_is_told(model: Path) -> None:
    """After prompts that stream and ones that do not, on two workers, one of them refused."""

    async def main() -> None:
        async with engine(model, workers=2, demand_tokens=8) as rig, rig.client() as client:
            sampling = Sampling(max_tokens=3, ignore_eos=True)
            prompts = [[5 + i] * (4 + 8 * (i % 2)) for i in range(6)]
            await asyncio.gather(*(client.generate(token_ids=p, sampling=sampling).text() for p in prompts))
            await client.generate(token_ids=[5] * 40, sampling=sampling).text()
            await client.generate(token_ids=[5] * 40, sampling=sampling).text()
            with pytest.raises(Exception, match="invalid_request"):
                await client.generate(token_ids=[]).text()
            seen = await look(client)
            stats = await client.stats()
            assert seen.stats == stats and seen.health and seen.health.ready
            text = Metrics("m", Clock()).text(seen)

        found = families(text)
        assert {name: family.type for name, family in found.items()} == AS_VLLM | OF_OFFLOADING
        assert all(family.documentation for family in found.values())
        assert (value(found, "engine_up"), value(found, "engine_ready")) == (1, 1)
        assert value(found, "prompt_tokens") == 6 * 8 + 2 * 40 == stats.prompt_tokens
        assert value(found, "generation_tokens") == 8 * 3 == stats.generated_tokens
        assert value(found, "requests_finished") == 8 and value(found, "requests_refused") == 1
        assert value(found, "prefix_cache_queries") == stats.prompt_tokens
        assert value(found, "prefix_cache_hits") == stats.cached_tokens == 32
        for phase in ("decode", "demand", "streamed"):
            counters = getattr(stats, phase)
            assert value(found, "expert_hits", phase=phase) == counters.hits > 0
            assert value(found, "expert_misses", phase=phase) == counters.misses
            assert value(found, "copied_bytes", phase=phase) == counters.misses * RECORD_NBYTES
            assert value(found, "copy_wait_seconds", phase=phase) == counters.copy_wait_s
            assert value(found, "step_seconds", phase=phase) == counters.step_s > 0
        assert value(found, "chunks", mode="demand") == stats.demand.steps
        assert value(found, "chunks", mode="streamed") == stats.streamed.steps
        assert value(found, "decode_steps") == stats.decode.steps
        assert (value(found, "bank_bytes"), value(found, "pinned_bytes")) == (stats.bank_nbytes, stats.pinned_nbytes)
        for worker in stats.workers:
            assert value(found, "worker_up", worker=worker.name) == 1
            assert value(found, "slots_resident", worker=worker.name) == worker.resident_slots
            assert value(found, "slots", worker=worker.name) == worker.slots == 8
            assert value(found, "stream_slots", worker=worker.name) == worker.stream_slots == 16
            assert value(found, "restarts", worker=worker.name) == worker.restarts == 0
            assert not worker.failed_steps
            assert value(found, "expert_hits", worker=worker.name, phase="decode") == worker.decode.hits
            assert value(found, "kv_cache_usage_perc", worker=worker.name) == 0, "nothing runs"

    on_loop("selector", main)


def test_kv_that_requests_hold_is_in_use(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.gate.clear()
            asking = asyncio.create_task(client.generate(token_ids=[5] * 60, sampling=Sampling(max_tokens=2)).text())
            await rig.settled(running=1)
            while not rig.worker.steps:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            found = families(Metrics("m").text(await look(client)))
            assert value(found, "num_requests_running") == 1 and value(found, "num_requests_waiting") == 0
            assert value(found, "kv_cache_usage_perc") == 4 / 256, "60 tokens in pages of 16, of 4096"
            rig.worker.gate.set()
            await asking

    on_loop("selector", main)


def test_nobody_is_waited_for_longer_than_a_look_may_take() -> None:
    async def main() -> None:
        async with Client(NOBODY) as client:
            assert await look(client, with_activity=True, deadline_s=0.05) == Look()

    on_loop("selector", main, limit_s=10)
