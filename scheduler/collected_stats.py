"""--collect-stats: what the experts of each layer saw of the requests, as a JSON file for whoever places experts by it.

```json
{"model": "...", "layers": 48, "experts": 128,
 "decode":   {"hits": [L], "misses": [L], "hit_rate": [L]},
 "demand":   {...}, "streamed": {...},
 "decode_routing": [[E], ...],
 "oracle":   {"window_steps": 128, "steps": ..., "lookups": ..., "hits": ..., "oracle_hits": ...,
              "hit_rate": ..., "oracle_hit_rate": ...}}
```
Sums over all workers, those that died included as far as they were asked before. `decode_routing[l][e]` counts the
decode steps that routed to expert e of layer l; a hit rate is null where nothing was looked up.

`oracle` compares the cache policy with the best that as many slots could do (worker/oracle.py) over the same `steps`
decode steps: those among the first `window_steps` decode and demand steps after each asking, which is every EVERY_S.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from copyengine.wire.errors import SlotstreamError
from copyengine.wire.logs import Log
from worker.client import WorkerClient
from worker.protocol import LOGGED_STEPS, LayerStatsReply, LayerTraffic, OracleFigures

EVERY_S = 30.0
"""Seconds between two writings while the engine runs: what a killed one loses at most."""

ANSWER_S = 30.0
"""Seconds that workers have for their figures, which they give between two steps: the time between two writings."""

LAST_ANSWER_S = 2.0
"""The same when the engine stops: the process has STOP_GRACE_S in all."""

log = Log(__name__)


class ModeFigures(Struct, frozen=True):
    """Of one mode, by layer."""

    hits: list[int]  # [L]
    misses: list[int]  # [L]
    hit_rate: list[float | None]  # [L]


class OracleRates(Struct, frozen=True):
    """The policy beside an oracle; the first five as worker.protocol.OracleFigures has them."""

    window_steps: int
    steps: int
    lookups: int
    hits: int
    oracle_hits: int
    hit_rate: float | None
    oracle_hit_rate: float | None


class Figures(Struct, frozen=True):
    """What the file holds."""

    model: str
    layers: int
    experts: int
    decode: ModeFigures
    demand: ModeFigures
    streamed: ModeFigures
    decode_routing: list[list[int]]  # [L, E]
    oracle: OracleRates | None = None  # not in files of before there was one


def figures(model: str, replies: Iterable[LayerStatsReply]) -> Figures:
    """The sums over `replies`, all of one model; empty without any."""
    told = summed(replies)
    return Figures(
        model=model,
        layers=len(told.routing),
        experts=len(told.routing[0]) if told.routing else 0,
        decode=_mode(told.decode),
        demand=_mode(told.demand),
        streamed=_mode(told.streamed),
        decode_routing=told.routing,
        oracle=_oracle(told.oracle),
    )


def summed(replies: Iterable[LayerStatsReply]) -> LayerStatsReply:
    """One reply that counts what `replies`, all of one model, count together; empty without any."""
    told = list(replies)
    return LayerStatsReply(
        decode=_traffic([reply.decode for reply in told]),
        demand=_traffic([reply.demand for reply in told]),
        streamed=_traffic([reply.streamed for reply in told]),
        routing=[_sums(rows) for rows in zip(*(reply.routing for reply in told), strict=True)],
        oracle=OracleFigures(*(sum(column) for column in zip(*(astuple(reply.oracle) for reply in told), strict=True))),
    )


def _traffic(told: list[LayerTraffic]) -> LayerTraffic:
    return LayerTraffic(_sums([each.hits for each in told]), _sums([each.misses for each in told]))


def _oracle(told: OracleFigures) -> OracleRates:
    rates = (_rate(hits, told.lookups) for hits in (told.hits, told.oracle_hits))
    return OracleRates(LOGGED_STEPS, *astuple(told), *rates)


def _rate(hits: int, lookups: int) -> float | None:
    return round(hits / lookups, 4) if lookups else None


def _mode(told: LayerTraffic) -> ModeFigures:
    rates = [_rate(h, h + m) for h, m in zip(told.hits, told.misses, strict=True)]
    return ModeFigures(told.hits, told.misses, rates)


def _sums(rows: Sequence[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


class Collector:
    """Asks the workers and writes the file. Nothing that goes wrong in it ends anything: it is logged."""

    def __init__(self, path: Path, model: str, workers: Callable[[], Sequence[WorkerClient]]) -> None:
        """`workers` are those that live now; each process has a client of its own."""
        self._path = path.resolve()
        self._model = model
        self._workers = workers
        self._told: dict[WorkerClient, LayerStatsReply] = {}  # last answers of those that live
        self._past: list[LayerStatsReply] = []  # the sum of those that lived before, if any
        self._writer = ThreadPoolExecutor(1, "collect-stats")  # one: the last writing comes last

    async def run(self) -> None:
        """Write every EVERY_S until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.write(ANSWER_S)

    async def write(self, deadline_s: float) -> None:
        """Ask all workers, wait `deadline_s` at most for each, and write what is known then."""
        try:
            workers = self._workers()
            self._fold_all_but(workers)
            await asyncio.gather(*(self._ask(worker, deadline_s) for worker in workers))
            content = msgspec.json.encode(figures(self._model, [*self._past, *self._told.values()]))
            await asyncio.get_running_loop().run_in_executor(self._writer, replace_file, self._path, content)
        except OSError as error:
            log.error("stats_unwritten", file=str(self._path), detail=error.strerror or str(error))
        except Exception as error:  # serving goes on, and so does its end
            log.failed("stats_failed", error, words=True, file=str(self._path))

    def _fold_all_but(self, living: Sequence[WorkerClient]) -> None:
        """However many workers come and go, what is kept of them does not grow."""
        past = [self._told.pop(worker) for worker in list(self._told) if worker not in living]
        if past:
            self._past = [summed(self._past + past)]

    async def _ask(self, worker: WorkerClient, deadline_s: float) -> None:
        try:
            self._told[worker] = await worker.layer_stats(deadline_s)
        except SlotstreamError as error:
            log.warning("stats_old", detail=f"a worker's figures are those of its last answer: {error}")


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
        await asyncio.wait({writing})
        await collector.write(LAST_ANSWER_S)
