"""`python -m scheduler` as a process, against the lifecycle that lifecycle.py states."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from msgspec.structs import replace

from copyengine.wire.errors import PeerTimeout, RequestRefused
from copyengine.wire.lifecycle import EXIT_CONFIG, Event, Listening, Progress, Ready, StartFailed, parse_event
from copyengine.wire.process import Orders
from scheduler.__main__ import serve
from scheduler.client import Client
from scheduler.config import SchedulerConfig
from scheduler.protocol import ActivityReply, HealthReply, Sampling
from scheduler.server import SchedulerServer
from tests.scheduler.rig import FakeWorker, on_loop

PRINTED = {
    "model", "workers", "device", "dtype", "moe_layers", "experts", "experts_per_token", "slots", "stream_slots",
    "cache_policy", "bank_nbytes", "pinned_nbytes", "pool_nbytes", "kv_tokens", "kv_nbytes", "kv_placement",
    "state_slots", "state_nbytes", "deterministic", "verify_copies", "max_model_len", "demand_tokens", "copy_engine",
    "event_loop",
}  # fmt: skip
"""What launch.py's Ready block is made of."""


class Process:
    """The scheduler with pipes, read from threads."""

    def __init__(self, *flags: str) -> None:
        argv = [sys.executable, "-m", "scheduler", *flags]
        self.popen = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )

    async def event(self) -> Event | None:
        assert self.popen.stdout is not None
        line = await asyncio.to_thread(self.popen.stdout.readline)
        return parse_event(line) if line else None

    async def tell(self, line: bytes | None) -> None:
        assert self.popen.stdin is not None
        if line is None:
            self.popen.stdin.close()
        else:
            self.popen.stdin.write(line)

    async def code(self) -> int:
        return await asyncio.to_thread(self.popen.wait, 10)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()


@asynccontextmanager
async def scheduler(
    model: Path, *flags: str, port: str = "0", **facts: Any
) -> AsyncIterator[tuple[Process, FakeWorker]]:
    context = zmq.asyncio.Context()
    worker = FakeWorker(context, 400, **facts)
    process = Process("--model", str(model), "--workers", worker.endpoint, "--port", port, *flags)
    try:
        yield process, worker
    finally:
        process.close()
        await worker.die()
        context.term()


async def until_ready(process: Process) -> tuple[str, Ready]:
    listening = await process.event()
    assert isinstance(listening, Listening)
    progress = [await process.event(), await process.event()]
    assert progress == [Progress("experts", 1, 2), Progress("dense weights", 2, 2)]
    ready = await process.event()
    assert isinstance(ready, Ready)
    return listening.endpoint, ready


def test_it_listens_loads_and_is_ready_with_the_facts(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with scheduler(model, "--event-loop", event_loop, "--slots", "9") as (process, worker):
            endpoint, ready = await until_ready(process)
            facts = ready.facts
            assert set(facts) == PRINTED
            assert facts["model"] == model.name
            assert facts["event_loop"] == event_loop
            assert facts["slots"] == worker.facts.slots
            assert (facts["demand_tokens"], facts["max_model_len"], facts["workers"]) == (512, 4096, 1)
            assert (worker.loads[0].slots, worker.loads[0].max_step_tokens) == (9, 4096)
            async with Client(endpoint) as client:
                answer = client.generate(token_ids=[5], sampling=Sampling(max_tokens=2, ignore_eos=True))
                assert [t async for piece in answer for t in piece.token_ids] == [6, 7]

    on_loop(event_loop, main)


def test_health_says_what_is_being_loaded(model: Path) -> None:
    async def main() -> None:
        async with scheduler(model) as (process, worker):
            worker.load_gate.clear()
            listening = await process.event()
            assert isinstance(listening, Listening)
            async with Client(listening.endpoint) as client:
                nothing = HealthReply(ready=False, phase="loading", model=model.name)
                async with asyncio.timeout(10):
                    while (health := await client.health()) == nothing:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                assert health == replace(nothing, loading="experts", done_nbytes=1, total_nbytes=2)
                assert await client.activity() == ActivityReply([], [])
                worker.load_gate.set()
                async with asyncio.timeout(10):
                    while not isinstance(await process.event(), Ready):
                        pass
                assert await client.health() == HealthReply(True, "ready", model.name, 4096, 400, places=16 + 256)

    on_loop("selector", main)


@pytest.mark.parametrize("way", ["eof", "SIGTERM", "SIGINT"])
def test_it_stops_at_once_when_told(model: Path, event_loop: str, way: str) -> None:
    if way != "eof" and sys.platform == "win32":
        pytest.skip("Windows has no such signals to send")

    async def main() -> None:
        flags = ["--parent-pipe"] if way == "eof" else []
        async with scheduler(model, "--event-loop", event_loop, *flags) as (process, _):
            await until_ready(process)
            if way == "eof":
                await process.tell(None)
            else:
                process.popen.send_signal(getattr(signal, way))
            assert await process.code() == 0

    on_loop(event_loop, main)


@pytest.mark.parametrize("way", ["eof", "SIGTERM", "SIGINT"])
def test_a_stop_ends_what_runs_with_the_code_of_a_stop(model: Path, event_loop: str, way: str) -> None:
    if way != "eof" and sys.platform == "win32":
        pytest.skip("Windows has no such signals to send")

    async def main() -> None:
        flags = ["--parent-pipe"] if way == "eof" else []
        async with scheduler(model, "--event-loop", event_loop, *flags) as (process, worker):
            endpoint, _ = await until_ready(process)
            worker.step_s = 0.01
            async with Client(endpoint) as client:
                answer = aiter(client.generate(token_ids=[5], sampling=Sampling(max_tokens=2000, ignore_eos=True)))
                await anext(answer)
                if way == "eof":
                    await process.tell(None)
                else:
                    process.popen.send_signal(getattr(signal, way))
                with pytest.raises(RequestRefused) as ended:
                    while True:
                        await anext(answer)
                assert (ended.value.code, ended.value.detail) == ("draining", "the engine is stopping")
            assert await process.code() == 0

    on_loop(event_loop, main)


def test_a_bug_that_leaves_no_worker_usable_ends_the_process(model: Path, event_loop: str) -> None:
    """By the exit code its launcher sees, and with the cause; the request has its end before."""

    async def main() -> None:
        async with scheduler(model, "--event-loop", event_loop, "--parent-pipe") as (process, worker):
            endpoint, _ = await until_ready(process)
            worker.short = True
            async with Client(endpoint) as client:
                with pytest.raises(RequestRefused) as ended:
                    await client.generate(token_ids=[5]).text()
                assert ended.value.code == "worker_failed"
            failed = await process.event()
            assert isinstance(failed, StartFailed) and failed.code == "internal"
            assert failed.detail.startswith("the core loop failed: ValueError")
            assert await process.event() is None and await process.code() == 1

    on_loop(event_loop, main)


def test_nothing_is_taken_while_the_server_closes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `close` does not know of it cannot end."""
    closed_while_serving: list[bool] = []

    class Server(SchedulerServer):
        serving = False

        async def serve(self) -> None:
            self.serving = True
            try:
                await super().serve()
            finally:
                await asyncio.sleep(0)
                self.serving = False

        async def close(self) -> None:
            closed_while_serving.append(self.serving)
            await super().close()

    async def load(*_: object) -> int:
        await asyncio.sleep(0.01)
        return 0

    monkeypatch.setattr("scheduler.__main__.SchedulerServer", Server)
    monkeypatch.setattr("scheduler.__main__._load_and_serve", load)

    async def main() -> None:
        assert await serve(SchedulerConfig(model=str(model), workers="", port=0), Orders()) == 0
        assert closed_while_serving == [False]

    on_loop("selector", main)


def test_a_socket_that_hears_nothing_any_more_ends_the_process_with_its_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server(SchedulerServer):
        async def serve(self) -> None:
            raise zmq.ZMQError(zmq.ENOTSOCK)

    monkeypatch.setattr("scheduler.__main__.SchedulerServer", Server)

    async def main() -> None:
        context = zmq.asyncio.Context()
        worker = FakeWorker(context, 400)
        config = SchedulerConfig(model=str(model), workers=worker.endpoint, port=0)
        with pytest.raises(zmq.ZMQError):
            await asyncio.wait_for(serve(config, Orders()), 10)
        await worker.die()
        context.term()

    on_loop("selector", main)


def test_a_dead_worker_does_not_end_the_process(model: Path) -> None:
    async def main() -> None:
        async with scheduler(model) as (process, worker):
            endpoint, _ = await until_ready(process)
            await worker.die()
            async with Client(endpoint) as client:
                async with asyncio.timeout(2):
                    while (health := await client.health()).phase != "dead":  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                assert not health.ready
            assert process.popen.poll() is None

    on_loop("selector", main)


def test_a_drain_with_nothing_running_is_over_at_once(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with scheduler(model, "--event-loop", event_loop, "--parent-pipe") as (process, _):
            await until_ready(process)
            await process.tell(b"drain\n")
            assert await process.code() == 0

    on_loop(event_loop, main)


def test_it_drains_when_told(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with scheduler(model, "--event-loop", event_loop, "--parent-pipe") as (process, worker):
            endpoint, _ = await until_ready(process)
            worker.step_s = 0.01
            async with Client(endpoint) as client:
                answer = client.generate(token_ids=[5], sampling=Sampling(max_tokens=30, ignore_eos=True))
                ids = []
                async for piece in answer:
                    ids += piece.token_ids
                    if len(ids) == 1:
                        await process.tell(b"drain\n")
                assert len(ids) == 30
            assert await process.code() == 0

    on_loop(event_loop, main)


def test_a_taken_port_refuses_the_start(model: Path) -> None:
    async def main() -> None:
        context = zmq.Context()
        with context.socket(zmq.ROUTER) as other:
            port = other.bind_to_random_port("tcp://127.0.0.1")
            async with scheduler(model, port=str(port)) as (process, _):
                failed = await process.event()
                assert isinstance(failed, StartFailed)
                assert failed.code == "config"
                assert str(port) in failed.detail
                assert await process.code() == EXIT_CONFIG
        context.term()

    on_loop("selector", main)


@pytest.mark.parametrize(
    ("flags", "facts", "named"),
    [
        (["--host", "0.0.0.0"], {}, "--host 0.0.0.0"),
        (["--host", "::1"], {}, "--host ::1"),
        (["--host", "example.com"], {}, "--host example.com"),
        (["--max-model-len", "5000"], {}, "4096 positions"),
        (["--max-model-len", "100"], {"kv_tokens": 96}, "--kv-tokens"),
        (["--demand-tokens", "-1"], {}, "--demand-tokens"),
        (["--event-loop", "proactor"], {}, "--event-loop"),
        (["--workers", "foo"], {}, "the worker at 'foo'"),
    ],
)
def test_a_wrong_setting_refuses_the_start_by_name(
    model: Path, flags: list[str], facts: dict[str, Any], named: str
) -> None:
    async def main() -> None:
        async with scheduler(model, *flags, **facts) as (process, _):
            event = await process.event()
            while isinstance(event, Listening | Progress):
                event = await process.event()
            assert isinstance(event, StartFailed)
            assert (event.code, named in event.detail) == ("config", True), event
            assert await process.code() == EXIT_CONFIG

    on_loop("selector", main)


def test_a_load_that_times_out_names_its_cause_and_the_setting(model: Path) -> None:
    async def main() -> None:
        async with scheduler(model) as (process, worker):
            worker.load_failures.append(PeerTimeout("the copy engine said nothing for 120 s"))
            assert isinstance(await process.event(), Listening)
            failed = await process.event()
            assert isinstance(failed, StartFailed)
            assert failed.code == "peer_timeout"
            assert "the copy engine said nothing" in failed.detail and "--ready-timeout-s" in failed.detail
            assert await process.code() == 1

    on_loop("selector", main)


def test_the_scheduler_never_loads_torch() -> None:
    code = "import sys, scheduler.__main__, scheduler.client_cli\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
