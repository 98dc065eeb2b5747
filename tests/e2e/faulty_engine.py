"""An engine whose calls fail when a test says so (fault_shim/sitecustomize.py), and what its slots hold."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq.asyncio

from copyengine.wire.errors import RequestRefused
from tests.e2e.engine import Engine, running
from tests.e2e.streams import END_S
from worker.client import WorkerClient
from worker.protocol import SlotsVerified, StatsReply

SHIM = Path(__file__).parent / "fault_shim"
ANSWER_S = 20.0


class FaultyEngine:
    """A running engine, and the file that its processes look at."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self.engine = engine
        self._path = path

    def happen(self, **told: object) -> None:
        """From now on what the shim's docstring says; nothing if nothing is told."""
        tell(self._path, **told)


def tell(path: Path, **told: object) -> None:
    """Write the file; no reader sees half of it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(told), "utf-8")
    os.replace(fresh, path)


@contextmanager
def faulty(path: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[FaultyEngine]:
    """A ready engine in which nothing fails yet; `path` is where its file is to be."""
    tell(path)
    own = env or {}
    folders = os.pathsep.join(filter(None, (str(SHIM), own.get("PYTHONPATH", os.environ.get("PYTHONPATH")))))
    with running(*flags, env=own | {"PYTHONPATH": folders, "FAULTS_FILE": str(path)}) as engine:
        yield FaultyEngine(engine, path)


def worker_endpoint(engine: Engine, number: int = 0) -> str:
    """Where a worker listens now, as its scheduler is told at its start or, of one started anew, as it is bound to."""
    ports = [one.laddr.port for one in engine.child(f"worker{number}").net_connections("tcp") if not one.raddr]
    assert len(ports) == 1 and psutil.LINUX, ports
    return f"tcp://127.0.0.1:{ports[0]}"


def verified_slots(engine: Engine, number: int = 0) -> SlotsVerified:
    """What a worker started with --verify-copies says of its cache slots."""
    return _asked(engine, number)[0]


def worker_stats(engine: Engine, number: int = 0) -> StatsReply:
    """A worker's own counters."""
    return _asked(engine, number)[1]


def _asked(engine: Engine, number: int) -> tuple[SlotsVerified, StatsReply]:
    async def ask() -> tuple[SlotsVerified, StatsReply]:
        context = zmq.asyncio.Context()
        client = WorkerClient(context, worker_endpoint(engine, number))
        try:
            return await client.verify_slots(ANSWER_S), await client.stats()
        finally:
            await client.close()
            context.term()

    return asyncio.run(ask())


async def failure(asking: Awaitable[list[int]]) -> RequestRefused:
    """How the answer ends, within END_S from now."""
    start_s = time.monotonic()
    with pytest.raises(RequestRefused) as refused:
        await asking
    assert time.monotonic() - start_s < END_S
    return refused.value
