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

from copyengine.wire.lifecycle import EXIT_CONFIG, Event, Listening, Progress, Ready, StartFailed, parse_event
from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.scheduler.rig import FakeWorker, on_loop


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


async def until_ready(process: Process) -> Ready:
    listening = await process.event()
    assert isinstance(listening, Listening)
    progress = [await process.event(), await process.event()]
    assert progress == [Progress("experts", 1, 2), Progress("dense weights", 2, 2)]
    ready = await process.event()
    assert isinstance(ready, Ready)
    assert ready.facts["endpoint"] == listening.endpoint
    return ready


def test_it_listens_loads_and_is_ready_with_the_facts(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with scheduler(model, "--event-loop", event_loop, "--slots", "9") as (process, worker):
            facts = (await until_ready(process)).facts
            assert facts["model"] == model.name
            assert facts["event_loop"] == event_loop
            assert facts["slots"] == worker.facts.slots
            assert (facts["demand_tokens"], facts["max_model_len"], facts["workers"]) == (512, 4096, 1)
            assert (worker.loads[0].slots, worker.loads[0].max_step_tokens) == (9, 4096)
            async with Client(str(facts["endpoint"])) as client:
                answer = client.generate(token_ids=[5], sampling=Sampling(max_tokens=2, ignore_eos=True))
                assert [t async for piece in answer for t in piece.token_ids] == [6, 7]

    on_loop(event_loop, main)


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


def test_it_drains_when_told(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with scheduler(model, "--event-loop", event_loop, "--parent-pipe") as (process, worker):
            endpoint = str((await until_ready(process)).facts["endpoint"])
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


def test_a_scheduler_without_its_worker_gives_up_after_the_deadline(model: Path) -> None:
    async def main() -> None:
        flags = ["--model", str(model), "--workers", "tcp://127.0.0.1:9", "--port", "0", "--ready-timeout-s", "0.5"]
        process = Process(*flags)
        try:
            assert isinstance(await process.event(), Listening)
            failed = await process.event()
            assert isinstance(failed, StartFailed)
            assert failed.code == "peer_timeout"
            assert await process.code() == 1
        finally:
            process.close()

    on_loop("selector", main)


def test_the_scheduler_never_loads_torch() -> None:
    code = "import sys, scheduler.__main__, scheduler.client_cli\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
