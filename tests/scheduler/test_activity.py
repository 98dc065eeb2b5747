"""What goes on, over real sockets with made-up workers: against steps let through one by one and counted by hand."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from scheduler.activity import MAX_LISTED, activity_reply
from scheduler.client import Client
from scheduler.detokenize import NoText
from scheduler.lane import Lane
from scheduler.protocol import RunningRequest, Sampling, WorkerResidency
from scheduler.request import Ending, Request
from scheduler.ticket import Ticket
from tests.scheduler.rig import Rig, engine, on_loop
from worker.protocol import ResidencyReply
from worker.protocol import Sampling as StepSampling


async def ask(client: Client, request_id: str, prompt_tokens: int, **sampling: Any) -> None:
    """Have an answer of 500 tokens drawn; returns when that is over."""
    wanted = Sampling(max_tokens=500, ignore_eos=True, **sampling)
    await client.generate(token_ids=[5] * prompt_tokens, sampling=wanted, request_id=request_id).text()


async def until(rig: Rig, steps: int) -> None:
    """Until the worker has been sent that many."""
    async with asyncio.timeout(20):
        while len(rig.worker.steps) < steps:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def let_through(rig: Rig, steps: int) -> None:
    """The step that is out ends; the next one is number `steps`."""
    rig.worker.gate.set()
    rig.worker.gate.clear()
    await until(rig, steps)


def figures(requests: list[RunningRequest]) -> list[tuple[str, int, str, int, int, int]]:
    return [(r.request_id, r.index, r.phase, r.prompt_tokens, r.computed_tokens, r.new_tokens) for r in requests]


async def waiting(client: Client, count: int) -> None:
    async with asyncio.timeout(20):
        while (await client.stats()).waiting != count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def test_each_request_is_told_with_its_phase_and_its_tokens(model: Path, event_loop: str) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"max_running_requests": 2, "demand_tokens": 8, "chunked_prefill_size": 16}
        async with engine(model, disable_prefix_cache=True, **settings) as rig, rig.client() as client:
            assert (await client.activity()).requests == []
            rig.worker.gate.clear()
            asked = [asyncio.create_task(ask(client, "a", 3))]
            await until(rig, 1)
            assert figures((await client.activity()).requests) == [("a", 0, "prefill", 3, 0, 0)]
            await let_through(rig, 2)  # a decodes
            asked.append(asyncio.create_task(ask(client, "b", 40)))
            await rig.settled(running=2)
            asked.append(asyncio.create_task(ask(client, "c", 7)))
            await waiting(client, 1)
            await let_through(rig, 3)  # the first chunk of b
            rest = [("b", 0, "prefill", 40, 0, 0), ("c", 0, "waiting", 7, 0, 0)]
            assert figures((await client.activity()).requests) == [("a", 0, "decode", 3, 4, 2), *rest]
            await let_through(rig, 4)  # a decodes
            told = (await client.activity()).requests
            rest[0] = ("b", 0, "prefill", 40, 16, 0)
            assert figures(told) == [("a", 0, "decode", 3, 4, 2), *rest]
            assert {one.worker for one in told} == {"worker0"}
            assert 60 > told[0].age_s > told[1].age_s > told[2].age_s > 0
            rig.worker.gate.set()
            for request_id in ("a", "b", "c"):
                await client.abort(request_id)
            await asyncio.gather(*asked)
            assert (await client.activity()).requests == []

    on_loop(event_loop, main)


def test_several_answers_are_told_each_by_itself(model: Path) -> None:
    """The others wait for the first one's prompt."""

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            rig.worker.gate.clear()
            asked = asyncio.create_task(ask(client, "a", 20, n=3))
            await until(rig, 1)
            wanted = [("a", 0, "prefill", 20, 0, 0), ("a", 1, "waiting", 20, 0, 0), ("a", 2, "waiting", 20, 0, 0)]
            assert figures((await client.activity()).requests) == wanted
            await let_through(rig, 2)  # the others' last page
            wanted = [("a", 0, "decode", 20, 20, 1), ("a", 1, "prefill", 20, 16, 0), ("a", 2, "prefill", 20, 16, 0)]
            assert figures((await client.activity()).requests) == wanted
            rig.worker.gate.set()
            await client.abort("a")
            await asked

    on_loop("selector", main)


def test_those_that_wait_come_last_and_too_many_are_left_out() -> None:
    """Of 300 each third one decodes, each third one has ended; what is not accepted is no request."""
    tickets: dict[tuple[bytes, str], Ticket] = {}
    for number in range(450):
        ticket = tickets[b"", f"r{number}"] = Ticket(lambda _: None)
        ticket.arrived_s = time.monotonic() - 1000 + number
        ticket.request = Request(number, [5], StepSampling(), Ending(9), NoText(), ticket.arrived_s)
        ticket.request.phase = ("waiting", "decode", "ended")[number % 3]
        ticket.lane = cast(Lane, type("Named", (), {"name": "worker3"}))
    tickets[b"", "new"] = Ticket(lambda _: None)
    reply = activity_reply(tickets, [])
    decoding, waits = [f"r{n}" for n in range(1, 450, 3)], [f"r{n}" for n in range(0, 450, 3)]
    assert [told.request_id for told in reply.requests] == (decoding + waits)[:MAX_LISTED]
    assert reply.left_out == 300 - MAX_LISTED and reply.residency == []


def test_slots_are_told_as_the_worker_told_them_last(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in a long step holds nobody up; it is asked once, however often that is wanted."""
    monkeypatch.setattr("scheduler.last_known.FRESH_S", 0.0)

    async def main() -> None:
        async with engine(model, workers=2) as rig, rig.client() as client:
            first, second = rig.workers
            second.residency = ResidencyReply()
            known = [told for told in (await client.activity()).residency if told.age_s < 60]
            assert [(told.name, told.layers, told.experts, told.resident) for told in known] == [
                ("worker0", 2, 8, b"\x0f\x07"),
                ("worker1", 0, 0, b""),
            ]
            monkeypatch.setattr("scheduler.activity.ANSWER_S", 0.05)
            first.residency = ResidencyReply(2, 8, b"\xff\x00")
            first.residency_gate.clear()
            asked = first.residency_asked
            for _ in range(3):
                held = (await client.activity()).residency
                assert held[0] == WorkerResidency("worker0", 2, 8, b"\x0f\x07", held[0].age_s)
                assert 0.05 <= held[0].age_s < 60 and held[1].age_s < held[0].age_s
            assert first.residency_asked == asked + 1
            first.residency_gate.set()
            monkeypatch.setattr("scheduler.activity.ANSWER_S", 10.0)
            assert (await client.activity()).residency[0].resident == b"\xff\x00"
            await first.die()
            await rig.lost(0)
            assert [told.name for told in (await client.activity()).residency] == ["worker1"]

    on_loop("selector", main)


def test_slots_are_known_before_the_first_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has asked for them, and now the first step takes long."""
    monkeypatch.setattr("scheduler.activity.ANSWER_S", 0.05)
    monkeypatch.setattr("scheduler.last_known.FRESH_S", 0.0)

    async def main() -> None:
        async with engine(model) as rig, rig.client() as client:
            async with asyncio.timeout(20):
                while rig.lanes[0].residency.answer is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            rig.worker.residency_gate.clear()
            assert [told.resident for told in (await client.activity()).residency] == [b"\x0f\x07"]
            assert rig.worker.residency_asked == 2

    on_loop("selector", main)
