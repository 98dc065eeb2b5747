"""A lane over a real connection to a made-up worker, against how each of its requests must end."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable

import pytest
import zmq.asyncio

from copyengine.wire.errors import CopyFailed, PeerTimeout, RequestRefused
from scheduler.core import Core, CoreLimits
from scheduler.counters import worker_counters
from scheduler.detokenize import NoText
from scheduler.lane import Lane, running
from scheduler.protocol import Failed, Finished, Timing, Tokens, Usage
from scheduler.request import Ending, Request
from scheduler.request_log import log_end
from tests.scheduler.rig import FakeWorker, on_loop
from worker.client import WorkerClient
from worker.protocol import Sampling

NOTHING = Finished("abort", Usage(0, 0, 0, 0, 0, 0, 0, 0), Timing(0.0, 0.0, 0.0, 0.0))
LIMITS = CoreLimits(pages=64, page_tokens=16, max_running=2, demand_tokens=8, chunk_tokens=16)


@contextlib.asynccontextmanager
async def lanes(count: int = 1) -> AsyncIterator[list[tuple[Lane, FakeWorker]]]:
    """Lanes whose loops the test runs, each with a worker of its own."""
    context = zmq.asyncio.Context()
    workers = [FakeWorker(context, 400) for _ in range(count)]
    clients = [WorkerClient(context, worker.endpoint) for worker in workers]
    try:
        pairs = zip(clients, workers, strict=True)
        yield [(Lane("worker0", client, Core(LIMITS), worker.facts), worker) for client, worker in pairs]
    finally:
        for client, worker in zip(clients, workers, strict=True):
            await client.close()
            await worker.die()
        context.term()


Outbox = asyncio.Queue[Tokens | Finished | Failed]


def submit(lane: Lane, sequence: int, max_tokens: int = 500) -> Outbox:
    outbox: Outbox = asyncio.Queue()
    lane.submit(Request(sequence, [5, 6, 7], Sampling(), Ending(max_tokens), NoText(), 0.0), outbox)
    return outbox


async def end_of(outbox: Outbox) -> Finished | Failed:
    async with asyncio.timeout(20):
        while True:
            if isinstance(message := await outbox.get(), Finished | Failed):
                return message


def nothing_left(lane: Lane) -> bool:
    return lane.core.running == lane.core.waiting == 0 and lane.core.pages.own == 0


def test_a_cancelled_lane_ends_its_requests_as_a_stop_does() -> None:
    """Those that run and the one that waits."""

    async def main() -> None:
        async with lanes() as [(lane, worker)]:
            worker.step_s = 0.01
            async with running([lane]):
                outboxes = [submit(lane, sequence) for sequence in range(3)]
                assert isinstance(await outboxes[0].get(), Tokens)
            ends = [await end_of(outbox) for outbox in outboxes]
            assert ends == [Failed("draining", "the engine is stopping")] * 3
            assert nothing_left(lane) and not lane.broken

    on_loop("selector", main)


def test_a_step_that_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.lane.STEP_DEADLINE_S", 0.05)

    async def main() -> None:
        async with lanes() as [(lane, worker)]:
            worker.gate.clear()
            async with running([lane]):
                end = await end_of(submit(lane, 1))
                assert isinstance(end, Failed) and end.code == "worker_failed"
                assert end.detail.startswith("a demand step of 3 tokens took too long: no answer from the worker")
                assert not lane.alive and not lane.broken

    on_loop("selector", main)


def test_a_worker_that_waited_in_vain_for_its_copy_engine_is_dead() -> None:
    async def main() -> None:
        async with lanes() as [(lane, worker)]:
            worker.failures.append(PeerTimeout("the copy engine is silent"))
            async with running([lane]):
                end = await end_of(submit(lane, 1))
                assert end == Failed("worker_failed", "the worker cannot go on: the copy engine is silent")
                assert not lane.alive

    on_loop("selector", main)


def test_a_failed_step_ends_its_requests_and_the_lane_goes_on() -> None:

    async def main() -> None:
        async with lanes() as [(lane, worker)], running([lane]):
            worker.failures.append(CopyFailed("lost"))
            assert await end_of(submit(lane, 1)) == Failed("worker_failed", "lost")
            assert isinstance(await end_of(submit(lane, 2, max_tokens=3)), Finished)

    on_loop("selector", main)


def test_what_a_step_failed_of_is_told_where_it_means_something_to_a_client_and_counted() -> None:
    """Against the codes that protocol.Failed lists."""
    told = {"device_out_of_memory": "device_out_of_memory", "copy_damaged": "copy_damaged", "odd": "worker_failed"}

    async def main() -> None:
        async with lanes() as [(lane, worker)], running([lane]):
            for sequence, (code, expected) in enumerate(told.items()):
                worker.failures.append(RequestRefused(code, "why"))
                assert await end_of(submit(lane, sequence)) == Failed(expected, "why")
            assert isinstance(await end_of(submit(lane, 9, max_tokens=3)), Finished)
            assert lane.failed_steps == dict.fromkeys(told, 1) == worker_counters(lane).failed_steps

    on_loop("selector", main)


def test_a_step_that_cannot_be_sent_ends_its_requests_and_the_lane_goes_on() -> None:
    """The worker has seen nothing of it."""

    async def main() -> None:
        async with lanes() as [(lane, worker)], running([lane]):
            outbox: Outbox = asyncio.Queue()
            no_form = Sampling(seed=2**70)
            lane.submit(Request(1, [5], no_form, Ending(9), NoText(), 0.0), outbox)
            end = await end_of(outbox)
            assert isinstance(end, Failed) and end.code == "worker_failed" and "cannot be encoded" in end.detail
            assert lane.alive and not lane.loss and not worker.steps
            assert isinstance(await end_of(submit(lane, 2, max_tokens=3)), Finished)

    on_loop("selector", main)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def test_the_next_step_runs_while_the_worker_forgets_who_ended() -> None:
    """It has heard of that before the step."""

    async def main() -> None:
        async with lanes() as [(lane, worker)], running([lane]):
            worker.gate.clear()
            worker.release_gate.clear()
            first, second = submit(lane, 1, max_tokens=1), submit(lane, 2, max_tokens=3)
            await until(lambda: len(worker.steps) == 1)
            worker.gate.set()
            assert isinstance(await end_of(first), Finished)
            await until(lambda: len(worker.steps) == 2)
            assert worker.released == [1]
            worker.release_gate.set()
            assert isinstance(await end_of(second), Finished)

    on_loop("selector", main)


@pytest.mark.parametrize("way", ["at its end", "in a step", "while it waits for a place"])
def test_the_worker_forgets_who_ended_although_no_step_follows(way: str) -> None:
    async def main() -> None:
        async with lanes() as [(lane, worker)], running([lane]):
            if way == "at its end":
                assert isinstance(await end_of(submit(lane, 1, max_tokens=2)), Finished)
                await until(lambda: worker.released == [1])
            else:
                worker.gate.clear()
                requests = [Request(i, [5], Sampling(), Ending(500), NoText(), 0.0) for i in range(3)]
                for request in requests:
                    lane.submit(request, asyncio.Queue())
                await until(lambda: len(worker.steps) == 1)
                for request in requests[:: -1 if way == "while it waits for a place" else 1]:
                    assert lane.abort(request)
                worker.gate.set()
                await until(lambda: sorted(worker.released)[:2] == [0, 1])
            assert nothing_left(lane) and not lane.core.any_ended

    on_loop("selector", main)


@pytest.mark.parametrize("step_out", [True, False])
def test_a_worker_that_cannot_forget_is_of_no_use(step_out: bool) -> None:
    """As if a step had failed for good: what the step that is out yields counts no more."""

    async def main() -> None:
        async with lanes() as [(lane, worker)], running([lane]):
            worker.release_failure = RequestRefused("internal", "no such sequence")
            worker.gate.clear()
            first = submit(lane, 1, max_tokens=1)
            second = submit(lane, 2) if step_out else None
            await until(lambda: len(worker.steps) == 1)
            worker.release_gate.clear()
            worker.gate.set()
            assert isinstance(await end_of(first), Finished)
            if second:
                worker.gate.clear()
                await until(lambda: len(worker.steps) == 2)
            worker.release_gate.set()
            await until(lambda: not lane.alive)
            assert lane.loss == "internal" and "no such sequence" in lane.death and not lane.broken
            if second:
                assert await end_of(second) == Failed("worker_failed", lane.death)
            worker.gate.set()
            await asyncio.sleep(0.02)
            assert nothing_left(lane) and (second is None or second.empty())

    on_loop("selector", main)


def test_a_stop_beside_a_release_ends_requests_as_any_stop_does() -> None:
    async def main() -> None:
        async with lanes() as [(lane, worker)]:
            async with running([lane]):
                worker.release_gate.clear()
                first, second = submit(lane, 1, max_tokens=1), submit(lane, 2)
                assert isinstance(await end_of(first), Finished)
                await until(lambda: worker.released == [1])
            assert await end_of(second) == Failed("draining", "the engine is stopping")
            assert nothing_left(lane) and not lane.broken

    on_loop("selector", main)


def test_a_worker_whose_answers_cannot_be_read_any_more_is_lost_for_an_error_of_ours() -> None:
    """At once, not at the step's deadline, and with a code by which another one is asked for: it lives."""

    def fail(_: bytes) -> None:
        raise ZeroDivisionError("a bug")

    async def main() -> None:
        async with lanes() as [(lane, _)], running([lane]):
            lane.worker._rpc._codec.decode = fail  # type: ignore[method-assign, assignment]
            end = await end_of(submit(lane, 1))
            assert isinstance(end, Failed) and end.code == "worker_failed" and "ZeroDivisionError" in end.detail
            assert not lane.alive and lane.loss == "internal" and not lane.broken

    on_loop("selector", main)


def test_a_core_that_cannot_even_be_emptied_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise ValueError("pages [3] are not all owned")

    async def main() -> None:
        async with lanes(2) as [(lane, _), (other, _)]:
            lane.core.apply = lane.core.fail_all = fail  # type: ignore[assignment, method-assign]
            async with running([lane, other]) as collapse:
                end = await end_of(submit(lane, 1))
                assert end == Failed("worker_failed", "the core loop failed: ValueError; the log says where")
                assert lane.broken and lane.loss == "internal"
                await lane.revive(other.worker, Core(LIMITS), other.facts)
                assert lane.alive and not lane.broken and not lane.loss
                assert isinstance(await end_of(submit(lane, 2, max_tokens=3)), Finished)
                assert not collapse.done()

    on_loop("selector", main)
    assert "event=core_not_emptied" in caplog.text and "pages [3]" not in caplog.text


@pytest.mark.parametrize("where", ["in a step", "in the core"])
def test_words_of_an_error_that_nobody_foresaw_stay_where_it_was_raised(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They may quote the request that met it: its step's other requests, the lane's death and the log say its type."""
    error = ZeroDivisionError("Xylophon")

    def fail(*_: object) -> None:
        raise error

    async def main() -> None:
        async with lanes() as [(lane, worker)]:
            if where == "in the core":
                lane.core.apply = fail  # type: ignore[assignment, method-assign]
            else:
                worker.failures.append(error)
            async with running([lane]):
                end = await end_of(submit(lane, 1))
                assert isinstance(end, Failed) and end.code == "worker_failed"
                assert "ZeroDivisionError" in end.detail and "Xylophon" not in end.detail + lane.death
                log_end("a", NOTHING, end)

    with caplog.at_level("DEBUG"):
        on_loop("selector", main)
    assert "Xylophon" not in caplog.text
    assert ("event=step_failed" if where == "in a step" else "event=core_failed") in caplog.text
    assert re.search('event=request id=a end=worker_failed .* detail=".*ZeroDivisionError', caplog.text)


def test_lanes_collapse_when_the_last_has_died_and_one_was_broken() -> None:
    async def main() -> None:
        async with lanes(2) as [(one, one_worker), (other, other_worker)]:
            async with running([one, other]) as collapse:
                one_worker.short = True
                waiting = [submit(one, sequence) for sequence in range(3)]
                for outbox in waiting:
                    end = await end_of(outbox)
                    assert isinstance(end, Failed) and end.code == "worker_failed"
                    assert end.detail.startswith("the core loop failed: ValueError")
                assert one.broken and not one.alive and nothing_left(one)
                assert isinstance(await end_of(submit(other, 9, max_tokens=3)), Finished)
                assert not collapse.done()
                await other_worker.die()
                await asyncio.wait_for(collapse, 20)
            assert not other.broken

    on_loop("selector", main)


def test_dead_workers_alone_collapse_nothing() -> None:
    async def main() -> None:
        async with lanes() as [(lane, worker)], running([lane]) as collapse:
            outbox = submit(lane, 1)
            await outbox.get()
            await worker.die()
            end = await end_of(outbox)
            assert isinstance(end, Failed) and end.code == "worker_failed"
            await asyncio.sleep(0.05)
            assert not lane.alive and not lane.broken and not collapse.done()

    on_loop("selector", main)
