"""What an engine tells of itself, from outside: the file of --collect-stats, the log, the counters of each worker.

Against what its client was told of each answer.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from copyengine.wire.errors import SlotstreamError
from copyengine.wire.logs import ERASE_LINE
from scheduler.client import Client
from scheduler.protocol import Finished, HealthReply, Sampling, StatsReply
from tests.e2e.engine import RESTART_TIMEOUT_S, ROOT, START_TIMEOUT_S, STOP_TIMEOUT_S, launch_command, running

K, LAYERS, EXPERTS = 8, 8, 64
"""Of the built-in model."""

LONG = 1200
"""Tokens of a prompt of 19 chunks."""


async def ask(endpoint: str) -> tuple[list[Finished], StatsReply]:
    """Three answers, and the counters after them."""
    async with Client(endpoint) as client:
        ends = []
        for number in range(3):
            answer = client.generate(
                token_ids=[5 + number, 9, 30], sampling=Sampling(max_tokens=4, ignore_eos=True), request_id=f"r{number}"
            )
            async for _ in answer:
                pass
            assert answer.finished
            ends.append(answer.finished)
        return ends, await client.stats()


def test_file_log_and_counters_tell_what_clients_were_told(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    with running("--collect-stats", str(path)) as engine:
        ends, stats = asyncio.run(ask(engine.endpoint))
        assert engine.stop(signal.SIGTERM) == 0
        log = engine.text()

    (worker,) = stats.workers
    assert worker.alive and (worker.decode, worker.demand, worker.streamed) == (
        stats.decode,
        stats.demand,
        stats.streamed,
    )
    assert 0 < worker.resident_slots <= LAYERS * EXPERTS

    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    assert (found["layers"], found["experts"]) == (LAYERS, EXPERTS)
    for mode in ("decode", "demand", "streamed"):
        counters = getattr(stats, mode)
        assert (sum(found[mode]["hits"]), sum(found[mode]["misses"])) == (counters.hits, counters.misses)
    steps = stats.decode.steps
    assert steps == 9 and [sum(row) for row in found["decode_routing"]] == [K * steps] * LAYERS

    oracle = found["oracle"]  # the run is shorter than its window, and begins with nothing resident
    decode = stats.decode
    assert (oracle["steps"], oracle["lookups"], oracle["hits"]) == (decode.steps, decode.lookups, decode.hits)
    assert decode.hits <= oracle["oracle_hits"] <= decode.lookups

    for number, end in enumerate(ends):
        line = next(line for line in log.splitlines() if f"request id=r{number} " in line)
        told = dict(re.findall(r"(\w+)=(\S+)", line))
        assert (told["end"], told["prompt"], told["new"]) == ("length", "3", "4")
        assert (int(told["hits"]), int(told["misses"])) == (end.usage.expert_hits, end.usage.expert_misses)


class Watcher:
    """Hears what an engine says of its health, from before it listens until it is ready."""

    def __init__(self, endpoint: str) -> None:
        self.heard: list[HealthReply] = []
        self._endpoint = endpoint
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()))
        self._thread.start()

    async def _watch(self) -> None:
        end_s = time.monotonic() + START_TIMEOUT_S
        async with Client(self._endpoint) as client:
            while not (self.heard and self.heard[-1].ready) and time.monotonic() < end_s:
                with contextlib.suppress(SlotstreamError):
                    self.heard.append(await client.health(0.2))
                await asyncio.sleep(0.002)

    def all(self) -> list[HealthReply]:
        self._thread.join()
        return self.heard


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_health_and_activity_tell_what_goes_on() -> None:
    """While the checkpoint loads, while a long prompt is computed, and once nothing runs: then the experts that the
    worker says it holds are as many as it counted behind its last step. And when it is killed."""
    port = free_port()
    watcher = Watcher(f"tcp://127.0.0.1:{port}")
    with running("--port", str(port), "--demand-tokens", "64", "--chunked-prefill-size", "64") as engine:
        *before, ready = watcher.all()
        assert ready.ready and ready.max_model_len > LONG and not ready.loading
        assert {health.phase for health in before} == {"loading"}
        told = {health.loading for health in before if 0 <= health.done_nbytes <= health.total_nbytes > 0}
        assert told & {"experts", "slot pool", "dense weights"}
        engine.over(long_prompt)
        engine.over(lambda client: death_and_return(client, engine.child("worker0")))


async def long_prompt(client: Client) -> None:
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    answer = client.generate(token_ids=[5 + i % 500 for i in range(LONG)], sampling=sampling, request_id="long")
    answered = asyncio.create_task(answer.text())
    seen: list[int] = []
    while not answered.done():
        for told in (await client.activity()).requests:
            assert (told.request_id, told.prompt_tokens, told.worker) == ("long", LONG, "worker0")
            if told.phase == "prefill":
                seen.append(told.computed_tokens)
    await answered
    assert sorted(seen) == seen and len({tokens for tokens in seen if 0 < tokens < LONG}) > 2
    over_s = time.monotonic()
    while (reply := await client.activity()).residency[0].age_s > time.monotonic() - over_s:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    (held,), (worker,) = reply.residency, (await client.stats()).workers
    assert (held.layers, held.experts, len(held.resident)) == (LAYERS, EXPERTS, LAYERS * EXPERTS // 8)
    assert sum(byte.bit_count() for byte in held.resident) == worker.resident_slots > 0 and not reply.requests


async def death_and_return(client: Client, worker: psutil.Process) -> None:
    """The death is counted, and what it did before it died still is; it comes back with nothing resident."""
    before, heard = await client.stats(), list[HealthReply]()
    assert before.restarts == 0 and before.demand.copy_wait_s > 0
    worker.kill()
    async with asyncio.timeout(RESTART_TIMEOUT_S):
        while not (heard and heard[-1].ready and any(not health.ready for health in heard)):
            heard.append(await client.health())
            await asyncio.sleep(0.002)
    down = [health for health in heard if not health.ready]
    assert {health.phase for health in down} == {"restarting"} and all(health.detail for health in down)
    assert {health.loading for health in down} & {"worker0 slot pool", "worker0 dense weights", "experts"}
    after = await client.stats()
    assert (after.restarts, after.workers[0].restarts, after.slots) == (1, 1, before.slots)
    assert (after.demand, after.decode) == (before.demand, before.decode)
    assert after.bank_nbytes == before.bank_nbytes > 0
    assert not any((await client.activity()).residency[0].resident)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals of this kind")
def test_a_terminal_has_a_live_line_that_log_lines_erase() -> None:
    terminal, theirs = os.openpty()
    written = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # nobody has the other end any more
            while data := os.read(terminal, 4096):
                written.extend(data)

    def wait_for(text: bytes) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while text not in written and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert text in written, written.decode()

    reader = threading.Thread(target=read)
    with subprocess.Popen(launch_command(), cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        reader.start()
        try:
            erase = ERASE_LINE.encode()
            wait_for(erase + b"0 running | 0.0 tokens/s | decode hits - | link 0.00 GB/s\r")
            assert process.stdout
            endpoint = next(found.group() for line in process.stdout if (found := re.search(r"tcp://\S+", line)))
            asyncio.run(ask(endpoint))
            wait_for(b"0 running, 3 finished | ")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(STOP_TIMEOUT_S) == 0
    reader.join(STOP_TIMEOUT_S)
    os.close(terminal)
    lines = bytes(written).splitlines(keepends=True)
    assert sum(b" event=request id=r" in line for line in lines) == 3
    assert all(line.endswith(b"\r\n") for line in lines if b" event=request id=r" in line)
    assert re.search(re.escape(erase) + rb"\d{4}-[^\r]*: event=request id=r0 ", written)
    assert erase + b"\r" in bytes(written).rpartition(b"link ")[2], "the live line is erased, and only log lines follow"
    assert lines[-1].endswith(b" event=end code=0\r\n")
