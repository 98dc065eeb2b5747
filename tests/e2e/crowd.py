"""Many clients of one engine on a small model: how they ask, and what they leave behind in its processes."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from copyengine.checkpoint.random_model import Sizes, write_random_model
from scheduler.client import Client
from scheduler.protocol import Sampling, StatsReply
from tests.e2e.engine import Engine, own_nbytes, running
from tests.e2e.windows import CONDITIONS

SMALL = Sizes(
    layers=2, hidden=64, intermediate=64, experts=16, experts_per_token=2, heads=4, kv_heads=2, head_dim=16,
    vocab_size=512, max_position=9216, shards=1,
)  # fmt: skip
LOOPS = ["uvloop", pytest.param("windows", marks=pytest.mark.slow)]
"""One by default: a crowd takes its time, and both loops serve smaller ones in the other tests."""
AND_CUDA = [*LOOPS, pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("copyengine", "worker0", "scheduler", "http")
TASK_SHIM = Path(__file__).parent / "task_shim"
SETTLE_S = 30.0
PROBE_S = 0.05


@contextmanager
def engine_on(loop: str, model: Path, *flags: str, task_counts: Path | None = None) -> Iterator[Engine]:
    """An engine with HTTP in float32: on uvloop, on the selector loop in Windows' conditions, or "cuda", on a GPU."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    event_loop = {"uvloop": "uvloop", "windows": "selector"}.get(loop, "auto")
    env = dict(CONDITIONS) if loop == "windows" else {}
    flags = (*flags, "--device", "cuda") if loop == "cuda" else flags
    if task_counts is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TASK_SHIM), env.get("PYTHONPATH"))))
        env["TASK_COUNTS"] = str(task_counts)
    fixed = ("--model", str(model), "--dtype", "float32", "--event-loop", event_loop, "--http-port", "0")
    with running(*fixed, *flags, env=env) as engine:
        yield engine


def write_small_model(directory: Path) -> Path:
    write_random_model(directory, SMALL, dtype="float32")
    return directory


def prompt_of(number: int, tokens: int) -> list[int]:
    """Prompts of different numbers begin differently."""
    return [(number * 37 + (i + 1) * (number % 7 + 3) * 11) % (SMALL.vocab_size - 10) + 5 for i in range(tokens)]


def sampling(new_tokens: int) -> Sampling:
    return Sampling(max_tokens=new_tokens, ignore_eos=True)


async def tokens_of(client: Client, prompt: Sequence[int], new_tokens: int) -> list[int]:
    answer = client.generate(token_ids=prompt, sampling=sampling(new_tokens))
    return [token async for piece in answer for token in piece.token_ids]


class HttpAnswer(NamedTuple):
    status: int
    took_s: float  # from when the request was written to the first line of the answer
    body: bytes


class HttpClient:
    """One connection that is there before its request is sent, so that only the engine takes time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)

    def send(self, **body: Any) -> None:
        content = msgspec.json.encode({"temperature": 0, "ignore_eos": True, **body})
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
        self.writer.write(f"{head}\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)

    async def ask(self, **body: Any) -> HttpAnswer:
        start_s = time.monotonic()
        self.send(**body)
        head = await self.reader.readuntil(b"\r\n\r\n")
        took_s = time.monotonic() - start_s
        rest = await self.reader.read()
        self.close()
        return HttpAnswer(int(head.split()[1]), took_s, rest)

    def close(self, hard: bool = False) -> None:
        if hard:
            self.writer.transport.abort()
        else:
            self.writer.close()


def http_port(engine: Engine) -> int:
    return int(engine.url.rsplit(":", 1)[1])


class Standing(NamedTuple):
    """What the processes of an engine hold, each by its name."""

    descriptors: dict[str, int]
    threads: dict[str, int]
    tasks: dict[str, int]


def standing(engine: Engine, task_counts: Path | None = None) -> Standing:
    children = {name: engine.child(name) for name in NAMES}
    tasks = {}
    if task_counts is not None:
        for name, child in children.items():
            with contextlib.suppress(OSError, ValueError):
                tasks[name] = int((task_counts / str(child.pid)).read_text("utf-8"))
    return Standing(
        {name: child.num_fds() for name, child in children.items()},
        {name: child.num_threads() for name, child in children.items()},
        tasks,
    )


def resident_nbytes(engine: Engine) -> dict[str, int]:
    """Of memory that is each process's own: shared segments with experts count when they are touched."""
    return {name: own_nbytes(engine.child(name)) for name in NAMES}


def at_rest(stats: StatsReply) -> bool:
    """Nobody waits or runs, and every page is free or cached and can be had."""
    return stats.waiting == stats.running == 0 and stats.kv_pages_available == stats.kv_pages_total


def settled(engine: Engine, as_before: Standing | None = None, task_counts: Path | None = None) -> StatsReply:
    """Wait until nobody is served, and the processes hold what they held; AssertionError with what they hold."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        stats, now = engine.stats(), standing(engine, task_counts)
        if at_rest(stats) and as_before in (None, now):
            return stats
        assert time.monotonic() < end_s, (stats.waiting, stats.running, as_before, now)
        time.sleep(0.1)


def stretch() -> float:
    """How many times as long as it should what needs a processor takes now, since others want it too; at least 1."""
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    while time.process_time() - start_cpu_s < PROBE_S:
        pass
    return max(1.0, (time.monotonic() - start_s) / PROBE_S)
