"""`python -m worker` as a process, with a real copy engine and a tiny random model.

Checked against the lifecycle that lifecycle.py states, against a second worker's tokens, and against the ledger of
shared memory segments.
"""

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq.asyncio

from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.client import CopyEngineClient
from copyengine.config import CopyEngineConfig
from copyengine.device import ledger
from copyengine.wire import cli
from copyengine.wire.child import Child, Exited, Notices, Said
from copyengine.wire.errors import ConfigError, PeerDied
from copyengine.wire.lifecycle import EXIT_CONFIG, EXIT_PEER, Event, Listening, Ready, StartFailed
from copyengine.wire.loop import run
from worker.__main__ import serve
from worker.client import WorkerClient
from worker.compute import ComputeThread
from worker.config import WorkerConfig
from worker.protocol import Failed, Load, LoadProgress, RunStep, Sampling, SequenceStep, StepDone
from worker.server import WorkerServer

SIZES = Sizes(
    layers=2, hidden=32, intermediate=32, experts=8, experts_per_token=2, heads=2, kv_heads=1, head_dim=16,
    vocab_size=64, max_position=256, dense_intermediate=32,
)  # fmt: skip
E = TypeVar("E", bound=Event)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_random_model(directory, SIZES, dtype="float32")
    return directory


class Processes:
    """Children and what they reported."""

    def __init__(self) -> None:
        self.notices: Notices = queue.SimpleQueue()
        self.children: dict[str, Child] = {}
        self.order: list[Event] = []

    def start(self, name: str, config: Any) -> str:
        module = {"c": "copyengine", "w": "worker"}[name[0]]
        self.children[name] = Child(name, module, cli.to_argv(config), self.notices)
        return self.event(name, Listening).endpoint

    def event(self, name: str, kind: type[E]) -> E:
        while True:
            match self.notices.get(timeout=30):
                case Said(name=sender, event=event) if sender == name:
                    self.order.append(event)
                    if isinstance(event, kind):
                        return event
                case Exited(name=sender, code=code) if sender == name:
                    raise AssertionError(f"{name} ended with {code}")

    def exit_code(self, name: str) -> int:
        while True:
            match self.notices.get(timeout=30):
                case Exited(name=sender, code=code) if sender == name:
                    return code

    def segments(self, name: str) -> list[str]:
        pid = self.children[name].pid
        return [path.name for path in ledger.directory().iterdir() if f"@{pid}@" in path.name]

    def stop(self) -> None:
        for child in reversed(self.children.values()):
            child.stop()


@contextlib.contextmanager
def processes() -> Any:
    running = Processes()
    try:
        yield running
    finally:
        running.stop()


def settings(event_loop: str = "auto", **fields: Any) -> WorkerConfig:
    return WorkerConfig(threads=1, event_loop=event_loop, parent_pipe=True, **fields)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[WorkerClient]:
    context = zmq.asyncio.Context()
    client = WorkerClient(context, endpoint)
    try:
        yield client
    finally:
        await client.close()
        context.term()


def prefill(mode: str = "demand") -> RunStep:
    return RunStep(mode, [SequenceStep(1, [3, 1, 4, 1, 5], 0, [0], Sampling())])  # type: ignore[arg-type]


async def generate(client: WorkerClient, count: int, mode: str = "demand") -> list[int]:
    done = await client.run_step(prefill(mode), 20)
    tokens = []
    for position in range(5, 5 + count):
        assert isinstance(done, StepDone), done
        tokens += done.tokens
        done = await client.run_step(RunStep("decode", [SequenceStep(1, done.tokens, position, [0], Sampling())]), 20)
    return tokens


async def check_traffic(copy_engine: str, client: WorkerClient) -> None:
    """What the copy engine counted where it moved bytes is what the worker counted where it asked for them."""
    context = zmq.asyncio.Context()
    there = CopyEngineClient(context, copy_engine)
    copied, asked = await there.stats(), await client.stats()
    await there.close()
    context.term()
    for moved, modes in ((copied.demand, (asked.decode, asked.demand)), (copied.stream, (asked.streamed,))):
        assert moved.records == sum(mode.misses for mode in modes) > 0
        assert moved.nbytes == sum(mode.copied_nbytes for mode in modes)
        assert moved.failed_queries == 0
    assert (copied.prefetch.records, copied.malformed_records) == (0, 0)


@pytest.mark.parametrize("event_loop", ["selector", "uvloop"])
def test_both_forms_of_the_copy_engine_serve_the_same_tokens(model: Path, event_loop: str) -> None:
    answers = []
    with processes() as started:
        copy_engine = started.start("c", CopyEngineConfig(event_loop=event_loop, parent_pipe=True))  # type: ignore[arg-type]
        for name, endpoint in (("w1", copy_engine), ("w2", "")):
            listening = started.start(name, settings(event_loop, name=name, copy_engine=endpoint))
            ready = started.event(name, Ready)
            assert ready.facts["endpoint"] == listening
            assert ready.facts["event_loop"] == event_loop
            assert ready.facts["copy_engine"] == ("process" if endpoint else "thread")
            seen: list[LoadProgress] = []

            async def main(
                listening: str = listening, endpoint: str = endpoint, seen: list[LoadProgress] = seen
            ) -> None:
                async with connected(listening) as client:
                    facts = await client.load(Load(str(model), slots=8), 30, seen.append)
                    assert (facts.moe_layers, facts.experts, facts.experts_per_token) == (2, 8, 2)
                    assert (facts.slots, facts.dtype, facts.device) == (8, "float32", "cpu")
                    assert facts.bank_nbytes == 16 * facts.record_nbytes
                    assert facts.pool_nbytes == (facts.slots + facts.stream_slots) * facts.record_nbytes
                    answers.append(await generate(client, 6))
                    answers.append(await generate(client, 6, "streamed"))
                    stats = await client.stats()
                    assert (stats.decode.steps, stats.demand.steps, stats.streamed.steps) == (12, 1, 1)
                    assert stats.resident == 8
                    held = await client.residency(20)
                    assert (held.layers, held.experts, len(held.resident)) == (2, 8, 2)
                    assert sum(byte.bit_count() for byte in held.resident) == stats.resident
                    by_layer = await client.layer_stats(20)
                    assert sum(by_layer.decode.hits) == stats.decode.hits and len(by_layer.streamed.misses) == 2
                    assert [sum(row) for row in by_layer.routing] == [2 * 12, 2 * 12]  # K experts in every decode step
                    if endpoint:
                        await check_traffic(endpoint, client)

            run(main(), event_loop)  # type: ignore[arg-type]
            assert {"experts", "slot pool", "dense weights"} <= {progress.phase for progress in seen}
            own = [progress for progress in seen if not progress.shared]
            assert [progress.phase for progress in own if not progress.done_nbytes] == ["slot pool", "dense weights"]
            assert sum(progress.done_nbytes == progress.total_nbytes for progress in own) == 2
            assert started.segments(name)
            assert started.children[name].stop() == 0
            assert not started.segments(name)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals to send")
@pytest.mark.parametrize("death", ["SIGKILL", "SIGSTOP"])
def test_a_worker_without_its_copy_engine_answers_its_step_and_ends(
    model: Path, death: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed, it is noticed at once; stopped, when a step has waited its deadline, here two seconds. A copy engine
    that wakes up again finds nobody.
    """
    with processes() as started:
        copy_engine = started.start("c", CopyEngineConfig(parent_pipe=True))
        config = settings(copy_engine=copy_engine)
        started.children["w"] = Child("w", "tests.worker.impatient_worker", cli.to_argv(config), started.notices)
        endpoint = started.event("w", Listening).endpoint

        async def main() -> None:
            async with connected(endpoint) as client:
                await client.load(Load(str(model), slots=8), 30)
                await generate(client, 1)
                if death == "SIGKILL":  # while nobody waits
                    os.kill(started.children["c"].pid, signal.SIGKILL)
                else:
                    os.kill(started.children["c"].pid, signal.SIGSTOP)
                    outcome = await client.run_step(prefill("streamed"), 20)
                    assert isinstance(outcome, Failed) and outcome.code == "peer_timeout"
                await asyncio.wait_for(client.lost.wait(), 20)

        try:
            run(main(), "auto")
            assert started.exit_code("w") == EXIT_PEER
        finally:
            if death == "SIGSTOP":
                os.kill(started.children["c"].pid, signal.SIGCONT)
        assert not started.segments("w")
        lines = [line for line in capfd.readouterr().err.splitlines() if "this worker ends" in line]
        assert len(lines) == 1 and ("2 s" if death == "SIGSTOP" else "copy engine is gone") in lines[0]


def test_a_stop_during_the_pools_allocation_leaves_nothing(model: Path) -> None:
    """The compute thread is in the middle of making the slots when the worker is told to stop."""
    with processes() as started:
        config = settings()
        started.children["w"] = Child("w", "tests.worker.dawdling_worker", cli.to_argv(config), started.notices)
        endpoint = started.event("w", Listening).endpoint

        async def main() -> None:
            async with connected(endpoint) as client:
                load = asyncio.create_task(client.load(Load(str(model), slots=8), 30))
                while not any("pool" in name for name in started.segments("w")):
                    await asyncio.sleep(0.01)
                    assert not load.done()
                assert await asyncio.to_thread(started.children["w"].stop) == 0
                with pytest.raises(PeerDied):
                    await load

        run(main(), "auto")
        assert not started.segments("w")


def test_what_cannot_be_loaded_is_refused_by_name_and_the_worker_goes_on(model: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"slots": 7}, "--slots 7"),
        ({"slots": 1, "demand_prefill": False}, "--slots 1"),
        ({"hf_overrides": "[]"}, "--hf-overrides"),
    ]
    with processes() as started:
        endpoint = started.start("w", settings())

        async def main() -> None:
            async with connected(endpoint) as client:
                for load, named in wrong:
                    with pytest.raises(ConfigError, match=named):
                        await client.load(Load(**{"model": str(model), **load}), 30)
                await client.load(Load(str(model)), 30)
                await client.shutdown()

        run(main(), "auto")
        assert started.exit_code("w") == 0
        assert not started.segments("w")


def test_a_device_that_is_not_there_refuses_the_start() -> None:
    argv = [sys.executable, "-m", "worker", "--device", "cuda", "--ordinal", "999"]
    done = subprocess.run(argv, capture_output=True, timeout=30)
    assert done.returncode == EXIT_CONFIG
    assert b"StartFailed" in done.stdout and b"--device cuda" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals to send")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signals_stop_a_worker_that_runs_alone(model: Path, name: str) -> None:
    with processes() as started:
        endpoint = started.start("w", WorkerConfig(threads=1))

        async def main() -> None:
            async with connected(endpoint) as client:
                await client.load(Load(str(model)), 30)
                os.kill(started.children["w"].pid, getattr(signal, name))
                await asyncio.wait_for(client.lost.wait(), 20)

        run(main(), "auto")
        assert started.exit_code("w") == 0
        assert not started.segments("w")


def test_a_worker_that_ends_by_an_error_says_so_by_its_code_also_if_a_step_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[int] = []

    async def deaf(_: WorkerServer) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    async def stuck(_: ComputeThread, deadline_s: float) -> bool:
        return False

    monkeypatch.setattr(WorkerServer, "serve", deaf)
    monkeypatch.setattr(ComputeThread, "idle", stuck)
    monkeypatch.setattr("worker.__main__.bring_torch", lambda _: None)
    monkeypatch.setattr("worker.__main__.end_now", codes.append)

    async def test() -> None:
        with pytest.raises(zmq.ZMQError):
            await serve(settings(endpoint="tcp://127.0.0.1:0", copy_engine="tcp://127.0.0.1:1"))

    run(test(), "selector")
    assert codes == [1]


def test_it_listens_before_torch_is_there() -> None:
    code = "import sys, worker.__main__\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_start_that_fails_says_why() -> None:
    with processes() as started:
        started.start("w", settings())
        taken = started.order[0]
        assert isinstance(taken, Listening)
        started.children["w2"] = Child("w2", "worker", cli.to_argv(settings(endpoint=taken.endpoint)), started.notices)
        assert started.event("w2", StartFailed).code == "config"
        assert started.exit_code("w2") == EXIT_CONFIG
