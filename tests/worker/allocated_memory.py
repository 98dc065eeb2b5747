# mypy: allow-untyped-calls
"""What a start allocates on a GPU, beside what was planned for it, in a process that has no context there before.

`python -m tests.worker.allocated_memory FLAGS` with those of launch.py: does what launch.py does with them for one
worker, which is this process, runs the largest steps, and prints Allocated as one JSON line. For
tests/worker/test_allocated_memory.py and tests/bench/bench_memory.py.
"""

import queue
import subprocess
import sys
from collections.abc import Sequence

import msgspec
import zmq.asyncio
from msgspec import Struct

import launch
from copyengine.budget import Budget
from copyengine.device.cuda_worker import BLOCK_NBYTES
from copyengine.wire import cli
from copyengine.wire.child import Child, Exited, Notices, Said
from copyengine.wire.lifecycle import Listening, StartFailed
from copyengine.wire.loop import run
from scheduler.config import LaunchConfig, SchedulerConfig
from scheduler.preflight import Preflight, preflight
from scheduler.progress_line import ProgressLine
from scheduler.startup import load_request
from worker.__main__ import bring_torch
from worker.compute import ComputeThread
from worker.config import WorkerConfig
from worker.copy_engine_link import CopyEngineLink
from worker.engine import Engine
from worker.load import EngineLoader
from worker.protocol import Load, Mode, RunStep, Sampling, SequenceStep

LISTEN_S = 60.0
DECODES = 3
"""Steps of each size: the first compiles, the second captures a graph, the third replays it."""


class Size(Struct, frozen=True):
    """Bytes of one part."""

    name: str
    planned_nbytes: int
    allocated_nbytes: int


class Allocated(Struct, frozen=True):
    """Everything on the GPU, part by part; the last part is what is planned as free: contexts, libraries, graphs."""

    device: str
    free_nbytes: int  # before anything was started
    parts: list[Size]
    rest: Size

    @property
    def total(self) -> Size:
        """All parts but the rest."""
        planned, allocated = (
            sum(getattr(part, of) for part in self.parts) for of in ("planned_nbytes", "allocated_nbytes")
        )
        return Size("all parts", planned, allocated)


def allocated(flags: Sequence[str], timeout_s: float = 400.0) -> Allocated:
    """What a start with `flags` allocates, found by a process of its own. AssertionError, with what it said, if not."""
    command = [sys.executable, "-m", "tests.worker.allocated_memory", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Allocated)


async def observe(config: LaunchConfig, found: Preflight) -> Allocated:
    """Load as a worker does, with a copy engine in a process of its own, run the largest steps, and look."""
    engine = launch.Engine(config, found, ProgressLine())
    notices: Notices = queue.SimpleQueue()
    child = Child("copyengine", *engine.command("copyengine", {}), notices)
    try:
        endpoint = _endpoint(notices)
        worker = cli.parse(WorkerConfig, engine.command("worker0", {"copyengine": endpoint}).argv, "worker")
        scheduler = cli.parse(SchedulerConfig, engine.command("scheduler", {"worker0": ""}).argv, "scheduler")
        return await _as_worker(worker, load_request(scheduler), found)
    finally:
        child.stop()


async def _as_worker(config: WorkerConfig, load: Load, found: Preflight) -> Allocated:
    context, compute = zmq.asyncio.Context(), ComputeThread()
    await compute.run(lambda: bring_torch(config.threads))
    link = CopyEngineLink(context, config, config.run_id)
    loader = EngineLoader(config, config.run_id, link)
    try:
        engine = await loader(load, compute, lambda _: None)
        try:
            return await compute.run(lambda: _looked_at(engine, load, found))
        finally:
            engine.release("all was seen")
            await link.detach()
            await compute.run(engine.close)
    finally:
        loader.close()
        await link.close()
        context.term()


def _looked_at(engine: Engine, load: Load, found: Preflight) -> Allocated:
    import torch

    at_rest = torch.cuda.memory_allocated()
    for step in _steps(load, engine.facts.kv_tokens):
        engine.run(step)
    free_nbytes, reserved = torch.cuda.mem_get_info()[0], torch.cuda.max_memory_reserved()
    kept = torch.cuda.memory_reserved()  # what is given back by now is free again
    budget, before = found.budget, found.placement.gpus[0].free_nbytes
    kv = engine.facts.kv_nbytes if load.kv_placement == "device" else 0
    pool = -(-engine.facts.pool_nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
    parts = [
        Size("slot pool", budget.pool_nbytes, pool),
        Size("KV", _planned(budget, "KV ("), kv),
        Size("other weights, states, tables", _planned(budget, "other weights", "recurrent states"), at_rest - kv),
        Size("workspace", budget.workspace_nbytes, reserved - at_rest),
    ]
    rest = Size("contexts, libraries, graphs", budget.reserve_nbytes, before - free_nbytes - kept - pool)
    return Allocated(engine.facts.device, before, parts, rest)


def _planned(budget: Budget, *beginnings: str) -> int:
    return sum(part.nbytes for part in budget.parts if part.name.startswith(beginnings))


def _steps(load: Load, kv_tokens: int) -> list[RunStep]:
    """The largest prefill, streamed and on demand, smaller ones, then decode of every number of sequences."""
    longest = min(load.max_step_tokens, kv_tokens)
    modes: tuple[Mode, ...] = ("streamed", "demand")
    steps = [
        RunStep(mode, [_sequence(0, [i % 100 for i in range(rows)], 0, load.page_tokens)])
        for rows in (longest, max(1, longest * 3 // 4), max(1, longest // 3))
        for mode in modes
    ]
    for sequences in range(1, min(load.max_running, kv_tokens // load.page_tokens) + 1):
        rows = [SequenceStep(i, [7], 0, [i], Sampling()) for i in range(sequences)]
        steps += [RunStep("decode", rows)] * DECODES
    return steps


def _sequence(number: int, tokens: list[int], start: int, page_tokens: int) -> SequenceStep:
    return SequenceStep(number, tokens, start, list(range(-(-len(tokens) // page_tokens))), Sampling())


def _endpoint(notices: Notices) -> str:
    while True:
        match notices.get(timeout=LISTEN_S):
            case Said(event=Listening(endpoint=endpoint)):
                return endpoint
            case Said(event=StartFailed(detail=detail)):
                raise RuntimeError(detail)
            case Exited(code=code):
                raise RuntimeError(f"the copy engine ended with {code}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was allocated."""
    config = cli.parse(LaunchConfig, argv, "tests.worker.allocated_memory")
    found = preflight(config, lambda text: print(text, file=sys.stderr))
    seen = run(observe(config, found), config.event_loop)
    print(msgspec.json.encode(seen).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
