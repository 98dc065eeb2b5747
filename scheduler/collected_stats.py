"""--collect-stats: what the experts of each layer saw of the requests, as a JSON file for whoever places experts by it.

```json
{"model": "...", "layers": 48, "experts": 128,
 "decode":   {"hits": [L], "misses": [L], "hit_rate": [L]},
 "demand":   {...}, "streamed": {...},
 "decode_routing": [[E], ...]}
```
Sums over all workers, those that died included as far as they were asked before. `decode_routing[l][e]` counts the
decode steps that routed to expert e of layer l; a hit rate is null where nothing was looked up.
"""

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from copyengine.wire.errors import SlotstreamError
from worker.client import WorkerClient
from worker.protocol import LayerStatsReply, LayerTraffic

EVERY_S = 30.0
"""Seconds between two writings while the engine runs: what a killed one loses at most."""

ANSWER_S = 30.0
"""Seconds that workers have for their figures, which they give between two steps."""

LAST_ANSWER_S = 2.0
"""The same when the engine stops: the process has STOP_GRACE_S in all."""

log = logging.getLogger(__name__)


class ModeFigures(Struct, frozen=True):
    """Of one mode, by layer."""

    hits: list[int]  # [L]
    misses: list[int]  # [L]
    hit_rate: list[float | None]  # [L]


class Figures(Struct, frozen=True):
    """What the file holds."""

    model: str
    layers: int
    experts: int
    decode: ModeFigures
    demand: ModeFigures
    streamed: ModeFigures
    decode_routing: list[list[int]]  # [L, E]


def figures(model: str, replies: Iterable[LayerStatsReply]) -> Figures:
    """The sums over `replies`, all of one model; empty without any."""
    told = list(replies)
    routing = [_sums(rows) for rows in zip(*(reply.routing for reply in told), strict=True)]
    return Figures(
        model=model,
        layers=len(routing),
        experts=len(routing[0]) if routing else 0,
        decode=_mode(reply.decode for reply in told),
        demand=_mode(reply.demand for reply in told),
        streamed=_mode(reply.streamed for reply in told),
        decode_routing=routing,
    )


def _mode(traffic: Iterable[LayerTraffic]) -> ModeFigures:
    told = list(traffic)
    hits, misses = _sums([each.hits for each in told]), _sums([each.misses for each in told])
    rates = [round(h / (h + m), 4) if h + m else None for h, m in zip(hits, misses, strict=True)]
    return ModeFigures(hits, misses, rates)


def _sums(rows: Sequence[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


class Collector:
    """Asks the workers and writes the file. Nothing that goes wrong in it ends anything: it is logged."""

    def __init__(self, path: Path, model: str, workers: Callable[[], Sequence[WorkerClient]]) -> None:
        """`workers` are those that live now; each process has a client of its own."""
        self._path = path.resolve()
        self._model = model
        self._workers = workers
        self._told: dict[WorkerClient, LayerStatsReply] = {}
        self._writer = ThreadPoolExecutor(1, "collect-stats")  # one: the last writing comes last

    async def run(self) -> None:
        """Write every EVERY_S until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.write(ANSWER_S)
            except Exception:  # serving goes on, and so does writing
                log.exception("--collect-stats %s: not written this time", self._path)

    async def write(self, deadline_s: float) -> None:
        """Ask all workers, wait `deadline_s` at most for each, and write what is known then."""
        await asyncio.gather(*(self._ask(worker, deadline_s) for worker in self._workers()))
        content = msgspec.json.encode(figures(self._model, self._told.values()))
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, replace_file, self._path, content)
        except OSError as error:
            log.error("--collect-stats %s: cannot be written: %s", self._path, error.strerror or error)

    async def _ask(self, worker: WorkerClient, deadline_s: float) -> None:
        try:
            self._told[worker] = await worker.layer_stats(deadline_s)
        except SlotstreamError as error:
            log.warning("--collect-stats: a worker's figures are those of its last answer: %s", error)


def replace_file(path: Path, content: bytes) -> None:
    """`path` holds `content` or what it held before, whatever happens. OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "something that is no file is there")
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(content + b"\n")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def collecting(file: str, model: str, workers: Callable[[], Sequence[WorkerClient]]) -> AsyncIterator[None]:
    """Inside, the figures are written now and then, and once more at the end; not at all if `file` is empty."""
    if not file:
        yield
        return
    collector = Collector(Path(file), model, workers)
    writing = asyncio.create_task(collector.run())
    try:
        yield
    finally:
        writing.cancel()
        await collector.write(LAST_ANSWER_S)
