"""Flush over real sockets and made-up workers: against what a start leaves, and who must be left alone."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from copyengine.wire.errors import RequestRefused
from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.scheduler.http.rig import serving
from tests.scheduler.rig import FakeWorker, Rig, engine, on_loop
from worker.protocol import RunStep

PROMPT = list(range(5, 55))


async def cached_tokens(client: Client) -> int:
    """Of PROMPT, once it is answered."""
    answer = client.generate(token_ids=PROMPT, sampling=Sampling(max_tokens=2))
    await answer.text()
    assert answer.finished
    return answer.finished.usage.cached_tokens


async def refused(flush: Awaitable[None]) -> str:
    with pytest.raises(RequestRefused) as error:
        await flush
    assert error.value.code == "busy"
    return error.value.detail


async def stepping(worker: FakeWorker, steps: int = 1) -> list[RunStep]:
    """Wait until the worker has been given so many."""
    async with asyncio.timeout(20):
        while len(worker.steps) < steps:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return worker.steps


def pages_cached(rig: Rig) -> int:
    return sum(lane.core.pages.cached for lane in rig.lanes)


@pytest.mark.parametrize("state_slots", [0, 9])
def test_nothing_is_cached_after_it_on_any_worker(model: Path, event_loop: str, state_slots: int) -> None:
    async def main() -> None:
        facts = {"state_slots": state_slots}
        async with engine(model, workers=2, facts=facts, max_running_requests=4) as rig, rig.client() as client:
            await client.flush()
            assert [await cached_tokens(client) for _ in range(2)] == [0, 48] and pages_cached(rig) > 0
            await client.flush()
            assert pages_cached(rig) == 0 and (await client.stats()).state_slots_free == 2 * state_slots
            assert [worker.flushes for worker in rig.workers] == [2, 2], "their slots are emptied too"
            assert await cached_tokens(client) == 0

    on_loop(event_loop, main)


def test_it_is_refused_while_a_request_of_whomever_runs_or_waits(model: Path) -> None:
    async def main() -> None:
        async with engine(model, max_running_requests=1) as rig, rig.client() as client, rig.client() as other:
            rig.worker.gate.clear()
            running = asyncio.create_task(cached_tokens(other))
            await stepping(rig.worker)
            assert (
                await refused(client.flush()) == "1 request has not ended; what is cached can be flushed when all have"
            )
            waiting = asyncio.create_task(cached_tokens(other))
            async with asyncio.timeout(20):
                while (await client.stats()).waiting == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            assert (await refused(client.flush())).startswith("2 requests have")
            rig.worker.gate.set()
            assert [await running, await waiting] == [0, 48], "both as if nobody had asked"
            assert rig.worker.flushes == 0
            await client.flush()
            assert pages_cached(rig) == 0

    on_loop("selector", main)


def test_the_step_of_a_request_that_was_left_is_waited_for(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.gate.clear()
            leaving = asyncio.create_task(cached_tokens(client))
            await stepping(rig.worker)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await client.settle()
            flushing = asyncio.create_task(client.flush())
            await client.stats()
            assert not flushing.done() and rig.worker.flushes == 0
            rig.worker.gate.set()
            await flushing
            assert pages_cached(rig) == 0 and rig.lanes[0].core.pages.own == 0

    on_loop("selector", main)


def test_a_request_that_comes_before_the_step_is_over_is_not_disturbed(model: Path) -> None:
    """Nor one that comes while the worker forgets: it finds nothing cached."""

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.gate.clear()
            leaving = asyncio.create_task(cached_tokens(client))
            await stepping(rig.worker)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await client.settle()
            flushing = asyncio.create_task(client.flush())
            await client.stats()
            late = asyncio.create_task(cached_tokens(client))
            await rig.settled(running=1)
            rig.worker.gate.set()
            assert "came before" in await refused(flushing)
            assert await late == 0 and rig.worker.flushes == 0
            rig.worker.flush_gate.clear()
            flushing = asyncio.create_task(client.flush())
            async with asyncio.timeout(20):
                while rig.worker.flushes == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            later = asyncio.create_task(cached_tokens(client))
            await rig.settled(running=1)
            steps = len(rig.worker.steps)
            await client.stats()
            assert len(rig.worker.steps) == steps, "no step goes out meanwhile"
            rig.worker.flush_gate.set()
            await flushing
            assert await later == 0

    on_loop("selector", main)


@pytest.mark.parametrize("before", [True, False], ids=["down before", "dies of it"])
def test_a_worker_that_is_gone_has_nothing_left(model: Path, before: bool) -> None:
    async def main() -> None:
        async with engine(model, workers=2) as rig, rig.client() as client:
            await cached_tokens(client)
            if before:
                await rig.workers[1].die()
                await rig.lost(1)
                await client.flush()
            else:
                rig.workers[1].flush_gate.clear()
                flushing = asyncio.create_task(client.flush())
                async with asyncio.timeout(20):
                    while rig.workers[1].flushes == 0:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                await rig.workers[1].die()
                await flushing
            assert pages_cached(rig) == 0 and rig.workers[0].flushes == 1

    on_loop("selector", main)


def test_who_asks_and_leaves_holds_nobody_up(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.flush_gate.clear()
            async with rig.client() as other:
                asked = asyncio.create_task(other.flush())
                async with asyncio.timeout(20):
                    while rig.worker.flushes == 0:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
            rig.worker.flush_gate.set()
            assert await cached_tokens(client) == 0

    on_loop("selector", main)


def test_over_http(model: Path) -> None:
    """By the name that SGLang has for it."""

    async def main() -> None:
        async with serving(model) as rig, Client(rig.engine.endpoint) as client:
            assert [await cached_tokens(client) for _ in range(2)] == [0, 48]
            reply = await rig.post("/flush_cache")
            assert (reply.status_code, reply.json()) == (200, {"status": "flushed"})
            assert await cached_tokens(client) == 0
            rig.engine.worker.gate.clear()
            steps = len(rig.engine.worker.steps)
            running = asyncio.create_task(cached_tokens(client))
            await stepping(rig.engine.worker, steps + 1)
            reply = await rig.post("/flush_cache")
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (409, "busy") and "has not ended" in error["message"]
            rig.engine.worker.gate.set()
            assert await running == 48

    on_loop("selector", main)
