"""The worker's server and client with a made-up engine, over real sockets on both event loops.

Checked against what the made-up engine was given and answered, and against the words of worker.protocol.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import zmq
import zmq.asyncio

from copyengine.wire.errors import ConfigError, CopyFailed, PeerDied, RequestRefused, SlotstreamError
from copyengine.wire.loop import run
from worker.client import WorkerClient
from worker.compute import ComputeThread
from worker.protocol import (
    ExpertStats,
    Failed,
    LayerStatsReply,
    LayerTraffic,
    Load,
    Loaded,
    LoadProgress,
    Mode,
    ResidencyReply,
    RunStep,
    SequenceStep,
    SlotsVerified,
    StepDone,
)
from worker.server import OnProgress, WorkerServer

FACTS = Loaded(
    "cpu", "float32", 100, 64, 2, 8, 2, 640, 8, 16, 64, 16, 1, 2, 3, 4, "process", 0.5
)  # fmt: skip


def step(token: int, mode: Mode = "decode") -> RunStep:
    return RunStep(mode, [SequenceStep(1, [token], 0, [0])])


class FakeEngine:
    """Answers a step with the tokens it was given; waits for `gate` first, and raises `failure` once."""

    def __init__(self) -> None:
        self.facts = FACTS
        self.seen: list[int] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.released = ""
        self.closed = False
        self.running = False
        self.flushes = 0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def run(self, step: RunStep) -> StepDone:
        self.running = True
        self.gate.wait(10)
        self.running = False
        self.threads.add(threading.current_thread().name)
        if self.released:
            raise PeerDied(self.released)
        failure, self.failure = self.failure, None
        if failure:
            raise failure
        token = step.sequences[0].tokens[0]
        self.seen.append(token)
        return StepDone([token], ExpertStats(1, 3, 1, 2, 1280))

    def stats(self) -> dict[Mode, ExpertStats]:
        return {"decode": ExpertStats(len(self.seen)), "demand": ExpertStats(), "streamed": ExpertStats()}

    def verify_slots(self) -> SlotsVerified:
        return SlotsVerified(0, [])

    def damaged_steps(self) -> int:
        return 0

    def distrusts_copies(self) -> bool:
        return False

    def layer_stats(self) -> LayerStatsReply:
        assert not self.running and threading.current_thread().name == "compute"
        return LayerStatsReply(LayerTraffic([1], [2]), LayerTraffic(), LayerTraffic(), [[len(self.seen), 0]])

    def with_oracle(self, reply: LayerStatsReply) -> LayerStatsReply:
        """See Engine."""
        return reply

    def residency(self) -> ResidencyReply:
        assert not self.running and threading.current_thread().name == "compute"
        return ResidencyReply(1, 3, bytes([len(self.seen)]))

    def resident(self) -> int:
        return 5

    def flush(self) -> None:
        assert not self.running and threading.current_thread().name == "compute"
        self.flushes += 1

    def release(self, why: str) -> None:
        self.released = why
        self.gate.set()

    def close(self) -> bool:
        assert not self.running and threading.current_thread().name == "compute"
        self.closed = True
        return True


class Rig:
    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.engine = FakeEngine()
        self.loads: list[Load] = []
        self.load_failure: SlotstreamError | None = None
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.server = WorkerServer(context, self.load)
        self.endpoint = self.server.bind("tcp://127.0.0.1:0")

    async def load(self, load: Load, compute: ComputeThread, on_progress: OnProgress) -> FakeEngine:
        self.loads.append(load)
        on_progress(LoadProgress("experts", 1, 2))
        await self.load_gate.wait()
        failure, self.load_failure = self.load_failure, None
        if failure:
            raise failure
        on_progress(LoadProgress("dense weights", 2, 2))
        return await compute.run(lambda: self.engine)


@contextlib.asynccontextmanager
async def worker() -> AsyncIterator[tuple[Rig, WorkerClient]]:
    context = zmq.asyncio.Context()
    rig = Rig(context)
    serving = asyncio.create_task(rig.server.serve())
    client = WorkerClient(context, rig.endpoint)
    try:
        yield rig, client
    finally:
        await client.close()
        await rig.server.close()
        serving.cancel()
        context.term()


async def until(holds: Callable[[], bool]) -> None:
    """The tests' own limit bounds it."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@pytest.fixture(params=["selector", "uvloop"])
def on_loop(request: pytest.FixtureRequest) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")

    def go(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(60):
                await main()

        run(limited(), request.param)

    return go


OnLoop = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


def test_a_load_relays_progress_and_answers_with_the_facts(on_loop: OnLoop) -> None:
    async def main() -> None:
        async with worker() as (rig, client):
            seen: list[LoadProgress] = []
            assert await client.load(Load("m"), 5, seen.append) == FACTS
            assert seen[0] == LoadProgress("experts", 1, 2)
            assert await client.load(Load("m"), 5) == FACTS, "the same again is answered"
            assert rig.loads == [Load("m")]
            with pytest.raises(ConfigError, match="another model"):
                await client.load(Load("m", slots=7), 5)
            assert await client.load(Load("m", deadline_s=7), 5) == FACTS, "a deadline is no size"

    on_loop(main)


def test_a_second_load_of_the_same_joins_the_first(on_loop: OnLoop) -> None:
    async def main() -> None:
        async with worker() as (rig, client):
            rig.load_gate.clear()
            loads = [asyncio.create_task(client.load(Load("m"), 5)) for _ in range(2)]
            await asyncio.sleep(0.05)
            rig.load_gate.set()
            assert await asyncio.gather(*loads) == [FACTS, FACTS]
            assert len(rig.loads) == 1

    on_loop(main)


def test_after_a_failed_load_another_one_may_come(on_loop: OnLoop) -> None:
    async def main() -> None:
        async with worker() as (rig, client):
            rig.load_failure = ConfigError("no such directory")
            with pytest.raises(ConfigError, match="no such directory"):
                await client.load(Load("m"), 5)
            assert await client.load(Load("n"), 5) == FACTS

    on_loop(main)


def test_nothing_runs_before_a_load(on_loop: OnLoop) -> None:
    async def main() -> None:
        async with worker() as (_, client):
            outcome = await client.run_step(step(1), 5)
            assert isinstance(outcome, Failed) and outcome.code == "not_loaded"
            with pytest.raises(RequestRefused, match="Load first"):
                await client.stats()

    on_loop(main)


def test_steps_run_in_order_on_one_thread_while_the_server_answers(on_loop: OnLoop) -> None:
    async def main() -> None:
        async with worker() as (rig, client):
            await client.load(Load("m"), 5)
            rig.engine.gate.clear()
            steps = [asyncio.create_task(client.run_step(step(token), 5)) for token in range(20)]
            stats = await client.stats()
            assert (stats.decode.steps, stats.slots, stats.resident) == (0, 8, 5)
            await client.release([1, 2], 5)
            rig.engine.gate.set()
            done = await asyncio.gather(*steps)
            assert [d.tokens for d in done if isinstance(d, StepDone)] == [[token] for token in range(20)]
            assert [d.resident for d in done if isinstance(d, StepDone)] == [5] * 20
            assert rig.engine.seen == list(range(20))
            assert rig.engine.threads == {"compute"}

    on_loop(main)


def test_counters_by_layer_are_taken_between_steps(on_loop: OnLoop) -> None:
    """Asked for while a step runs: answered behind it, by the thread that counts."""

    async def main() -> None:
        async with worker() as (rig, client):
            await client.load(Load("m"), 5)
            rig.engine.gate.clear()
            running = asyncio.create_task(client.run_step(step(7), 5))
            asked = asyncio.create_task(client.layer_stats(5))
            held = asyncio.create_task(client.residency(5))
            flushed = asyncio.create_task(client.flush(5))
            await client.stats()
            assert not asked.done() and not held.done() and not flushed.done() and rig.engine.flushes == 0
            rig.engine.gate.set()
            await running
            assert await held == ResidencyReply(1, 3, b"\x01")
            await flushed
            assert rig.engine.flushes == 1
            assert (await asked).routing == [[1, 0]] and (await asked).decode == LayerTraffic([1], [2])

    on_loop(main)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (CopyFailed("expert 3 did not land"), "copy_failed"),
        (RequestRefused("invalid_request", "no such page"), "invalid_request"),
        (PeerDied("the copy engine is gone"), "peer_died"),
        (RuntimeError("a bug"), "internal"),
    ],
)
def test_a_failed_step_is_a_value_and_the_next_one_works(on_loop: OnLoop, failure: Exception, code: str) -> None:
    async def main() -> None:
        async with worker() as (rig, client):
            await client.load(Load("m"), 5)
            rig.engine.failure = failure
            outcome = await client.run_step(step(1), 5)
            assert isinstance(outcome, Failed) and outcome.code == code
            assert isinstance(await client.run_step(step(2), 5), StepDone)

    on_loop(main)


def test_a_scheduler_that_disconnects_changes_nothing(on_loop: OnLoop) -> None:
    async def main() -> None:
        async with worker() as (rig, client):
            context = zmq.asyncio.Context()
            rig.load_gate.clear()
            first = WorkerClient(context, rig.endpoint)
            load = asyncio.create_task(first.load(Load("m"), 5))
            await until(lambda: bool(rig.loads))
            await first.close()
            with pytest.raises(PeerDied):
                await load
            rig.load_gate.set()
            context.term()
            assert await client.load(Load("m"), 5) == FACTS
            assert len(rig.loads) == 1
            assert isinstance(await client.run_step(step(2), 5), StepDone)

    on_loop(main)


def test_the_scheduler_whose_load_came_last_has_the_worker(on_loop: OnLoop) -> None:
    """Two schedulers would give out the same KV pages; the one that was there first must not go on unknowing."""

    async def main() -> None:
        async with worker() as (rig, client):
            context = zmq.asyncio.Context()
            await client.load(Load("m"), 5)
            second = WorkerClient(context, rig.endpoint)
            refused = await second.run_step(step(1), 5)
            assert isinstance(refused, Failed) and refused.code == "taken_over"
            assert await second.load(Load("m"), 5) == FACTS
            refused = await client.run_step(step(2), 5)
            assert isinstance(refused, Failed) and refused.code == "taken_over"
            assert isinstance(await second.run_step(step(3), 5), StepDone)
            assert rig.engine.seen == [3]
            await second.close()
            context.term()

    on_loop(main)


def test_malformed_frames_are_counted_and_harm_nobody(on_loop: OnLoop) -> None:
    async def main() -> None:
        async with worker() as (rig, client):
            await client.load(Load("m"), 5)
            context = zmq.asyncio.Context()
            with context.socket(zmq.DEALER) as socket:
                socket.connect(rig.endpoint)
                for frames in ([b""], [b"12345678", b"\xc1"], [b"12345678", b"\x81\xa4type\xa4Boom"]):
                    await socket.send_multipart(frames)
                await socket.recv_multipart()
                await socket.recv_multipart()
            context.term()
            assert (await client.stats()).dropped_frames == 3

    on_loop(main)


@contextlib.asynccontextmanager
async def shut_down_in_a_step(rig: Rig, context: zmq.asyncio.Context) -> AsyncIterator[asyncio.Task[Any]]:
    """A step that waits for a copy, its worker told to end and closed. The client's connection is lost after it."""
    serving = asyncio.create_task(rig.server.serve())
    client = WorkerClient(context, rig.endpoint)
    await client.load(Load("m"), 5)
    rig.engine.gate.clear()
    running = asyncio.create_task(client.run_step(step(1), 5))
    await until(lambda: rig.engine.running)
    await client.shutdown()
    await serving
    await rig.server.close()
    yield running
    async with asyncio.timeout(20):
        await client.lost.wait()
    await client.close()


def test_shutdown_ends_serving_and_closing_frees_the_engine(on_loop: OnLoop) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        rig = Rig(context)
        async with shut_down_in_a_step(rig, context) as running:
            assert rig.engine.released and not rig.engine.closed
            assert await rig.server.free(5) and rig.engine.closed, "a step that waited for a copy has ended"
            (outcome,) = await asyncio.gather(running, return_exceptions=True)
            # answered, if it ended before the socket did
            assert isinstance(outcome, PeerDied) or (isinstance(outcome, Failed) and outcome.code == "peer_died")
        context.term()

    on_loop(main)


def test_memory_is_not_freed_under_a_step_that_does_not_end(on_loop: OnLoop) -> None:
    """Not even after the server is closed: a GPU would compute on what is somebody else's by then."""

    async def main() -> None:
        context = zmq.asyncio.Context()
        rig = Rig(context)
        rig.engine.release = lambda why: None  # type: ignore[method-assign]
        async with shut_down_in_a_step(rig, context) as running:
            assert not await rig.server.free(0.1)
            assert not rig.engine.closed
            rig.engine.gate.set()
            with pytest.raises(PeerDied):
                await running
        context.term()

    on_loop(main)


def test_once_no_step_can_run_those_under_way_are_answered_and_serving_ends(on_loop: OnLoop) -> None:
    """Three steps are given when the engine is lost; the first is slow to notice."""

    async def main() -> None:
        context = zmq.asyncio.Context()
        rig = Rig(context)
        serving = asyncio.create_task(rig.server.serve())
        client = WorkerClient(context, rig.endpoint)
        await client.load(Load("m"), 5)
        rig.engine.gate.clear()
        steps = [asyncio.create_task(client.run_step(step(token), 5)) for token in range(3)]
        await until(lambda: rig.engine.running and len(rig.server._rpc._tasks) == 3)
        rig.engine.released = "the copy engine was too slow"
        rig.engine.lost.set_result(rig.engine.released)
        await asyncio.sleep(0.1)
        assert not serving.done()
        rig.engine.gate.set()
        with pytest.raises(PeerDied, match="this worker ends: the copy engine was too slow"):
            await serving
        await rig.server.close()
        for outcome in await asyncio.gather(*steps):
            assert isinstance(outcome, Failed) and outcome.code == "peer_died"
        assert await rig.server.free(5) and rig.engine.closed
        await client.close()
        context.term()

    on_loop(main)


def test_a_socket_that_hears_nothing_any_more_ends_serving_with_its_error(on_loop: OnLoop) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        rig = Rig(context)

        async def deaf() -> None:
            raise zmq.ZMQError(zmq.ENOTSOCK)

        rig.server._rpc.serve = deaf  # type: ignore[method-assign]
        with pytest.raises(zmq.ZMQError):
            await asyncio.wait_for(rig.server.serve(), 20)
        await rig.server.close()
        context.term()

    on_loop(main)


@pytest.mark.parametrize("when", ["before its turn", "while it runs", "after the loop was closed"])
def test_what_a_call_made_for_a_caller_that_gave_up_is_discarded(when: str) -> None:
    made: list[int] = []
    discarded: list[int] = []
    gate, busy = threading.Event(), threading.Event()

    def make() -> int:
        busy.set()
        gate.wait(10)
        made.append(1)
        return 1

    async def main() -> ComputeThread:
        compute = ComputeThread()
        if when == "before its turn":
            first = asyncio.create_task(compute.run(make))
            await asyncio.to_thread(busy.wait, 10)
        call = asyncio.create_task(compute.run(make, discarded.append))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(busy.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        if when == "after the loop was closed":
            return compute
        gate.set()
        assert await compute.idle(5)
        if when == "before its turn":
            assert await first == 1
        return compute

    run(main(), "selector")
    gate.set()
    for _ in range(1000):
        if made and (discarded or when == "before its turn"):
            break
        time.sleep(0.005)
    assert (made, discarded) == ([1], [] if when == "before its turn" else [1])


def test_a_busy_compute_thread_is_not_waited_for_forever(on_loop: OnLoop) -> None:
    async def main() -> None:
        compute, gate = ComputeThread(), threading.Event()
        call = asyncio.create_task(compute.run(gate.wait))
        await asyncio.sleep(0.01)
        assert not await compute.idle(0.02)
        gate.set()
        assert await compute.idle(5)
        assert await call is True

    on_loop(main)
