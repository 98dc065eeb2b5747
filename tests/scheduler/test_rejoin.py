"""Workers that die and come back, over real connections to made-up ones: what clients and the parent hear of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from copyengine.wire.errors import PeerTimeout, RequestRefused
from copyengine.wire.lifecycle import Event, Joined, Peer, PeerLost, Progress
from scheduler.client import Client
from scheduler.config import SchedulerConfig
from scheduler.protocol import Sampling
from scheduler.rejoin import Rejoiner
from tests.scheduler.rig import COPY_WAIT_S, FakeWorker, Rig, engine, expected, on_loop
from worker.protocol import ResidencyReply

PROMPT = [5, 6, 7]
DEATH = "gone: its connection closed"


class Parent:
    """Starts workers anew, tells the scheduler, and hears what it says."""

    def __init__(self, rig: Rig, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()
        self.said: asyncio.Queue[Event] = asyncio.Queue()
        self.started: list[FakeWorker] = []
        self._rig = rig

    def start(self, name: str = "worker0", **facts: Any) -> FakeWorker:
        worker = FakeWorker(self._rig.context, facts.pop("vocab_size", self.vocab_size), **facts)
        self.started.append(worker)
        self.peers.put_nowait(Peer(name, worker.endpoint))
        return worker

    async def heard(self) -> Event:
        """What is said next that is not of progress."""
        async with asyncio.timeout(20):
            while isinstance(event := await self.said.get(), Progress):
                pass
            return event


@contextlib.asynccontextmanager
async def restarting(model: Path, workers: int = 1, **settings: Any) -> AsyncIterator[tuple[Rig, Parent, Client]]:
    vocab_size = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    async with engine(model, workers, restarts=True, **settings) as rig, rig.client() as client:
        parent = Parent(rig, vocab_size)
        config = SchedulerConfig(model=str(model), workers="", **settings)
        rejoiner = Rejoiner(rig.context, config, rig.service, parent.said.put_nowait)
        rejoining = asyncio.create_task(rejoiner.run(parent.peers))
        try:
            yield rig, parent, client
        finally:
            rejoining.cancel()
            await asyncio.wait({rejoining})
            for worker in parent.started:
                await worker.die()


async def answer(client: Client, max_tokens: int = 4) -> list[int]:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return [t async for piece in client.generate(token_ids=PROMPT, sampling=sampling) for t in piece.token_ids]


async def dead(rig: Rig, number: int = 0) -> None:
    """The worker of that number dies, and its lane knows."""
    await rig.workers[number].die()
    async with asyncio.timeout(20):
        await rig.lanes[number].changed()


def test_a_worker_that_was_started_anew_serves_in_place_of_the_dead(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with restarting(model) as (rig, parent, client):
            right = expected(PROMPT, 4, parent.vocab_size)
            assert await answer(client) == right
            before = await client.stats()
            rig.worker.step_s = 0.01
            running = asyncio.create_task(answer(client, 2000))
            await rig.settled(running=1)
            await dead(rig)
            with pytest.raises(RequestRefused) as ended:
                await running
            assert ended.value.code == "worker_failed" and ended.value.detail.endswith(DEATH)
            worker = parent.start(slots=24)
            worker.residency = ResidencyReply(2, 8, b"\x01\x00")
            assert await parent.heard() == Joined("worker0", worker.endpoint)
            assert [told.resident for told in (await client.activity()).residency] == [b"\x01\x00"]
            assert [load.model for load in worker.loads] == [str(model)]
            assert [(told.alive, told.resident_slots) for told in (await client.stats()).workers] == [(True, 0)]
            assert await answer(client) == right and rig.lanes[0].worker.endpoint == worker.endpoint
            after = await client.stats()
            assert after.demand.steps >= before.demand.steps + 1 and after.decode.steps > before.decode.steps
            assert after.decode.copy_wait_s == after.decode.steps * COPY_WAIT_S
            assert (before.restarts, after.restarts, after.workers[0].restarts) == (0, 1, 1)
            assert (before.slots, after.slots, after.stream_slots) == (8, 24, 16)
            assert (after.failed, after.finished, after.running) == (1, 2, 0)
            assert rig.pages_free()

    on_loop(event_loop, main)


def test_without_a_worker_requests_are_refused_by_what_is_restarting(model: Path) -> None:
    async def main() -> None:
        async with restarting(model) as (rig, parent, client):
            await dead(rig)
            health = await client.health()
            assert (health.ready, health.phase) == (False, "restarting")
            with pytest.raises(RequestRefused) as refused:
                await answer(client)
            assert (refused.value.code, refused.value.detail) == (
                "not_ready",
                f"worker0 restarting: the worker is {DEATH}",
            )
            parent.start()
            await parent.heard()
            assert (await client.health()).phase == "ready"

    on_loop("selector", main)


def test_with_another_worker_requests_go_there_meanwhile(model: Path) -> None:
    async def main() -> None:
        async with restarting(model, workers=2) as (rig, parent, client):
            await dead(rig, 1)
            right = expected(PROMPT, 4, parent.vocab_size)
            assert await asyncio.gather(*(answer(client) for _ in range(4))) == [right] * 4
            assert (await client.health()).ready and not rig.workers[1].steps
            worker = parent.start("worker1")
            await parent.heard()
            assert await asyncio.gather(*(answer(client) for _ in range(4))) == [right] * 4
            assert worker.steps

    on_loop("selector", main)


@pytest.mark.parametrize(("workers", "phase"), [(1, "restarting"), (2, "ready")])
def test_health_says_what_a_worker_that_was_started_anew_loads(model: Path, workers: int, phase: str) -> None:
    """Also beside one that serves, and not any more once it has died of it."""

    async def main() -> None:
        async with restarting(model, workers) as (rig, parent, client):
            serving = await client.health()
            await dead(rig, workers - 1)
            down = await client.health()
            ready = workers > 1
            detail, places = "" if ready else f"the worker is {DEATH}", serving.places - 16
            assert down == replace(serving, ready=ready, phase=phase, detail=detail, places=places)
            name = f"worker{workers - 1}"
            for survives in (False, True):
                worker = parent.start(name)
                worker.load_gate.clear()
                async with asyncio.timeout(20):
                    while (health := await client.health()) == down:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                assert health == replace(down, loading=f"{name} experts", done_nbytes=1, total_nbytes=2)
                if not survives:
                    await worker.die()
                    async with asyncio.timeout(20):
                        while await client.health() != down:  # noqa: ASYNC110
                            await asyncio.sleep(0.005)
            worker.load_gate.set()
            await parent.heard()
            assert await client.health() == serving and serving.ready

    on_loop("selector", main)


def test_a_worker_dies_again_and_again(model: Path) -> None:
    """Also while it loads: only what became of the last one is told."""

    async def main() -> None:
        async with restarting(model) as (rig, parent, client):
            await dead(rig)
            for _ in range(3):
                loading = parent.start()
                loading.load_s = 60.0
                async with asyncio.timeout(20):
                    while not loading.loads:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                await loading.die()
            worker = parent.start()
            assert await parent.heard() == Joined("worker0", worker.endpoint)
            assert await answer(client) == expected(PROMPT, 4, parent.vocab_size)
            assert (await client.stats()).restarts == 4

    on_loop("selector", main)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 40}, "it now has 40 tokens in its vocabulary"),
    ({"kv_tokens": 64}, "room for 64 in a request"),
    ({"max_position": 32}, "room for 32 in a request"),
]


@pytest.mark.parametrize(("facts", "words"), REFUSED)
def test_a_worker_that_cannot_do_what_was_promised_is_refused(model: Path, facts: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with restarting(model) as (rig, parent, client):
            await dead(rig)
            worker = parent.start(**facts)
            lost = await parent.heard()
            assert isinstance(lost, PeerLost)
            assert (lost.peer, lost.endpoint, lost.code) == ("worker0", worker.endpoint, "config")
            assert words in lost.detail and "4096" in lost.detail
            assert (await client.health()).phase == "restarting" and (await client.stats()).restarts == 2

    on_loop("selector", main)


def test_a_worker_that_cannot_load_is_told_of_with_its_reason(model: Path) -> None:
    async def main() -> None:
        async with restarting(model) as (rig, parent, _):
            await dead(rig)
            worker = parent.start()
            worker.load_failures.append(PeerTimeout("the copy engine said nothing"))
            lost = await parent.heard()
            assert isinstance(lost, PeerLost)
            assert (lost.endpoint, lost.code) == (worker.endpoint, "peer_timeout")
            assert "the copy engine said nothing" in lost.detail and "--ready-timeout-s" in lost.detail

    on_loop("selector", main)


def test_what_the_parent_says_of_nobody_changes_nothing(model: Path) -> None:
    async def main() -> None:
        async with restarting(model) as (_, parent, client):
            parent.peers.put_nowait(Peer("worker7", "tcp://127.0.0.1:9"))
            parent.peers.put_nowait(Peer("worker0", "nowhere"))
            lost = await parent.heard()
            assert isinstance(lost, PeerLost) and (lost.peer, lost.code) == ("worker0", "config")
            assert await answer(client) == expected(PROMPT, 4, parent.vocab_size)

    on_loop("selector", main)


def test_a_worker_that_lives_but_is_of_no_use_is_told_of(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent ends it and starts another one; one whose connection closed needs no word of ours."""
    monkeypatch.setattr("scheduler.lane.STEP_DEADLINE_S", 0.05)

    async def main() -> None:
        async with restarting(model) as (rig, parent, client):
            rig.worker.gate.clear()
            with pytest.raises(RequestRefused, match="took too long"):
                await answer(client)
            lost = await parent.heard()
            assert isinstance(lost, PeerLost) and lost.endpoint == rig.worker.endpoint
            assert lost.code == "peer_timeout"
            assert "a demand step of 3 tokens took too long" in lost.detail
            second = parent.start()
            assert await parent.heard() == Joined("worker0", second.endpoint)
            await second.die()
            third = parent.start()
            assert await parent.heard() == Joined("worker0", third.endpoint)

    on_loop("selector", main)


def test_a_worker_that_serves_another_scheduler_is_told_of_as_taken_over(model: Path) -> None:
    async def main() -> None:
        async with restarting(model) as (rig, parent, client):
            rig.worker.failures.append(RequestRefused("taken_over", "another one has loaded"))
            with pytest.raises(RequestRefused, match="another one has loaded"):
                await answer(client)
            lost = await parent.heard()
            assert isinstance(lost, PeerLost)
            assert (lost.endpoint, lost.code) == (rig.worker.endpoint, "taken_over")

    on_loop("selector", main)


def test_a_lane_whose_core_failed_is_replaced_while_another_serves(model: Path) -> None:
    """With its worker, which is well; the last one's is let be, since the process ends and is started anew."""

    async def main() -> None:
        async with restarting(model, workers=2) as (rig, parent, client):
            rig.worker.short = True
            answers = await asyncio.gather(*(answer(client) for _ in range(2)), return_exceptions=True)
            right = expected(PROMPT, 4, parent.vocab_size)
            assert right in answers and sum(isinstance(each, RequestRefused) for each in answers) == 1
            lost = await parent.heard()
            assert isinstance(lost, PeerLost)
            assert (lost.peer, lost.endpoint, lost.code) == ("worker0", rig.worker.endpoint, "internal")
            assert "the core loop failed: ValueError" in lost.detail
            worker = parent.start("worker0")
            assert await parent.heard() == Joined("worker0", worker.endpoint)
            assert await asyncio.gather(*(answer(client) for _ in range(4))) == [right] * 4 and worker.steps
            await dead(rig, 1)
            worker.short = True
            with pytest.raises(RequestRefused, match="the core loop failed"):
                await answer(client)
            await asyncio.sleep(0.05)
            assert parent.said.empty()

    on_loop("selector", main)
