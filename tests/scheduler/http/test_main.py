"""`python -m scheduler.http` as a process of its own, over a scheduler in this one: its events, its ends."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from copyengine.wire import cli
from copyengine.wire.lifecycle import Listening, Ready, parse_event
from scheduler.config import LaunchConfig
from scheduler.http.config import HttpConfig
from tests.scheduler.http.rig import Connection
from tests.scheduler.rig import Rig, engine, on_loop

COMMAND = (sys.executable, "-m", "scheduler.http")


def test_its_flags_are_those_of_launch() -> None:
    """Where they have the same name they have the same words and defaults, but for the port, which turns HTTP on."""
    ours = {a.dest: a for a in cli.parser_for(HttpConfig, "x")._actions}
    launchs = {a.dest: a for a in cli.parser_for(LaunchConfig, "x")._actions}
    shared = set(ours) & set(launchs) - {"help", "model", "http_port"}
    assert {"http_host", "api_key", "http_max_body_bytes", "served_model_name", "hf_overrides"} <= shared
    for name in shared - {"event_loop"}:
        assert ours[name].help == launchs[name].help, name


def run(*flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False)


def test_it_tells_of_its_flags_and_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    told = run("--help")
    assert told.returncode == 0 and "--scheduler" in told.stdout and "--http-port" in told.stdout
    refused = run("--scheduler", "tcp://127.0.0.1:9", "--model", str(tmp_path / "none"), "--http-port", "0")
    assert refused.returncode == 2 and "no such directory" in refused.stderr and "Traceback" not in refused.stderr


class Front:
    """A process with a front."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.endpoint = ""

    async def event(self) -> Any:
        assert self.process.stdout
        async with asyncio.timeout(30):
            return parse_event(await self.process.stdout.readline())

    async def tell(self, order: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(order)
        await self.process.stdin.drain()

    async def end(self) -> tuple[int, str]:
        """Its exit code and what it said."""
        assert self.process.stderr
        async with asyncio.timeout(30):
            said = (await self.process.stderr.read()).decode()
            return await self.process.wait(), said


@contextlib.asynccontextmanager
async def started(model: Path, rig: Rig, *flags: str) -> AsyncIterator[tuple[Front, int]]:
    """A front that is ready, and its port."""
    argv = [*COMMAND, "--scheduler", rig.endpoint, "--model", str(model), "--http-port", "0", "--parent-pipe", *flags]
    pipe = asyncio.subprocess.PIPE
    front = Front(await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe))
    try:
        listening = await front.event()
        assert isinstance(listening, Listening) and listening.endpoint.startswith("http://")
        front.endpoint = listening.endpoint
        ready = await front.event()
        assert isinstance(ready, Ready) and ready.facts["model"] == model.name
        yield front, int(listening.endpoint.rsplit(":", 1)[1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            front.process.kill()
        await front.process.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="its selector loop has no child processes")
def test_a_drain_finishes_what_runs_and_a_stop_does_not(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model) as rig:
            rig.worker.step_s = 0.02
            for order in (b"drain\n", b""):
                async with started(model, rig, "--event-loop", event_loop) as (front, port):
                    client = Connection(port)
                    await client.post(prompt=[5], max_tokens=50 if order else 4000, stream=True)
                    await client.until(b"data: ")
                    if order:
                        await front.tell(order)
                        assert b"[DONE]" in await client.until(b"0\r\n\r\n")
                    else:
                        assert front.process.stdin
                        front.process.stdin.close()
                        got = await client.until(b"0\r\n\r\n")
                        assert b'"code":"draining"' in got and b"[DONE]" not in got
                    code, said = await front.end()
                    assert code == 0 and "Traceback" not in said and "ERROR" not in said
                    client.close()
                await rig.settled()

    on_loop(event_loop, main)


@pytest.mark.skipif(sys.platform == "win32", reason="its selector loop has no child processes")
def test_it_says_so_when_other_machines_reach_it(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as rig:
            for key, advice in (((), "it; anyone there may use it: set --api-key"), (("--api-key", "k"), "reach it")):
                async with started(model, rig, "--http-host", "0.0.0.0", *key) as (front, port):
                    assert front.endpoint == f"http://127.0.0.1:{port}", "what the Ready block has"
                    async with httpx.AsyncClient() as http:
                        reply = await http.get(f"http://127.0.0.1:{port}/v1/models")
                    assert reply.status_code == (401 if key else 200)
                    await front.tell(b"drain\n")
                    code, said = await front.end()
                    assert code == 0 and "WARNING" in said and f'{advice}"\n' in said and "0.0.0.0" in said

    on_loop("selector", main)


@pytest.mark.skipif(sys.platform == "win32", reason="its selector loop has no child processes")
def test_clients_that_leave_while_it_stops_leave_no_trace_in_the_log(model: Path) -> None:
    """Requests in all states: with headers only, encoding, waiting, streaming."""

    async def main() -> None:
        async with engine(model, max_running_requests=1) as rig:
            rig.worker.step_s = 0.02
            async with started(model, rig) as (front, port):
                clients = [Connection(port) for _ in range(5)]
                await clients[0].send(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n")
                await clients[1].send(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n")
                await clients[1].send(b"Content-Length: 100\r\n\r\n{")
                for client in clients[2:]:
                    await client.post(prompt=[5], max_tokens=4000, stream=client is clients[2])
                await clients[2].until(b"data: ")
                assert front.process.stdin
                front.process.stdin.close()
                await asyncio.sleep(0.01)
                clients[3].close()
                code, said = await front.end()
                assert code == 0 and "Traceback" not in said and "ERROR" not in said, said
                for client in clients[:3] + clients[4:]:
                    await client.ends()
                    client.close()
            await rig.settled()

    on_loop("selector", main)
