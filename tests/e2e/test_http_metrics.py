"""/metrics and what the live page asks for, of a real engine: against its own client, and over a scheduler's death."""

import time
from collections.abc import Callable
from typing import Any

import httpx

from scheduler.client import Client
from scheduler.protocol import StatsReply
from tests.e2e.engine import RESTART_TIMEOUT_S, Engine, running
from tests.scheduler.http.test_metrics import families, value

FLAGS = ("--slots", "64", "--demand-tokens", "64", "--chunked-prefill-size", "256", "--http-port", "0")
LAYERS, EXPERTS = 8, 64
"""Of the built-in model."""


def complete(base: str, prompt_tokens: int, max_tokens: int) -> None:
    body = {"prompt": [5] * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}
    assert httpx.post(f"{base}/v1/completions", json=body, timeout=60).raise_for_status()


def stats(engine: Engine) -> StatsReply:
    told: list[StatsReply] = []

    async def session(client: Client) -> None:
        told.append(await client.stats())

    engine.over(session)
    return told[0]


def wait_for(met: Callable[[], bool]) -> None:
    end_s = time.monotonic() + RESTART_TIMEOUT_S
    while not met():
        assert time.monotonic() < end_s
        time.sleep(0.2)


def test_figures_are_the_engines_and_survive_it() -> None:
    with running(*FLAGS) as engine:
        base = engine.fact("HTTP").removesuffix("/v1")

        def metrics() -> dict[str, Any]:
            return families(httpx.get(f"{base}/metrics").raise_for_status().content)

        for prompt_tokens in (9, 300):
            complete(base, prompt_tokens, 5)
        found, told = metrics(), stats(engine)
        assert value(found, "prompt_tokens") == told.prompt_tokens == 309
        assert value(found, "generation_tokens") == told.generated_tokens == 10
        assert value(found, "request_success", finished_reason="length") == told.finished == 2
        for phase in ("decode", "demand", "streamed"):
            counters = getattr(told, phase)
            assert value(found, "expert_hits", phase=phase) == counters.hits
            assert value(found, "expert_misses", phase=phase) == counters.misses > 0
            assert value(found, "copied_bytes", phase=phase) == counters.copied_nbytes > 0

        live = httpx.get(f"{base}/live").json()
        (residency,) = live["activity"]["residency"]
        assert (residency["layers"], residency["experts"]) == (LAYERS, EXPERTS)
        assert live["phase"] == "ready" and sum(live["ttft"]["counts"]) == 2

        scheduler = engine.child("scheduler")
        scheduler.suspend()
        silent = metrics()
        assert value(silent, "engine_up") == value(silent, "engine_ready") == 0 and "prompt_tokens" not in silent
        assert value(silent, "request_success") == 2, "the front has seen both"
        assert httpx.get(f"{base}/live").json()["phase"] == "away"
        scheduler.resume()
        wait_for(lambda: value(metrics(), "engine_ready") == 1)
        assert value(metrics(), "prompt_tokens") == 309

        scheduler.kill()
        wait_for(lambda: value(found := metrics(), "engine_ready") == 1 and value(found, "prompt_tokens") == 0)
        assert value(metrics(), "request_success") == 2, "the front's own go on"
