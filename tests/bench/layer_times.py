# mypy: allow-untyped-calls
"""Times of one MoE layer: on demand, streamed, as a decode graph. Each misses what its row says, which is checked."""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from copyengine.query import query_experts, stream_groups
from tests.bench.bench_kernels import ceilings
from tests.bench.layer_cases import Case
from tests.bench.layer_rig import CopyEngine, Pool, Routing
from tests.bench.routings import chosen
from worker.cuda_backend import CudaBackend
from worker.geometry import SlotGeometry
from worker.protocol import Mode

WARM_UP = 3
SLEEP_CYCLES = 1_000_000
LINK_RECORDS = 128

HEAD = (
    "case",
    "T",
    "query",
    "distinct",
    "missing",
    "ms a layer in a step",
    "ms of one layer alone",
    "host ms a layer",
    "link floor",
    "memory floor",
    "peer",
    "to reach",
)


class Rates(NamedTuple):
    """Bytes a second, measured in this run."""

    link: float  # neighbouring records from pinned memory
    memory: float


class Sample(NamedTuple):
    """Of one step, per layer."""

    ms: float
    host_ms: float


class Bench:
    """The rig, the pools on it, and what was found so far."""

    def __init__(self, options: argparse.Namespace, backend: CudaBackend, engine: CopyEngine) -> None:
        self.options = options
        self.backend = backend
        self.engine = engine
        self.rates = link_and_memory(engine.record.record_nbytes)
        self._pools: dict[tuple[int, int], Pool] = {}

    def pool(self, query: int, layers: int) -> Pool:
        """Slots of queries of `query` experts at most, for the first `layers` banks, all of them resident at first.

        There is one pool at a time: with several on one link, the copy engine cuts stream copies small.
        """
        found = self._pools.get((query, layers))
        if found is None or found.released:
            self.close_pools()
            groups = max(2, stream_groups(self.engine.experts) * query_experts(self.engine.experts) // query)
            nbytes = self.engine.record.record_nbytes
            geometry = SlotGeometry(layers, self.engine.experts, nbytes, self.options.slots, groups, query)
            found = self._pools[query, layers] = Pool(self.engine, self.backend, geometry)
            found.fill(self.engine.k)
        return found

    def close_pools(self) -> None:
        """All memory on the device goes back."""
        while self._pools:
            self._pools.popitem()[1].close()

    def routing(self, case: Case, seed: int) -> Routing:
        """Inputs of a layer."""
        drawn = chosen(case.tokens, self.engine.k, self.engine.experts, seed, case.zipf, case.distinct)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(case.tokens, self.engine.record.hidden, generator=generator).to(torch.bfloat16)
        weights = torch.rand(case.tokens, self.engine.k, generator=generator)
        weights /= weights.sum(1, keepdim=True)
        where = self.backend.device
        return Routing(x.to(where), weights.to(where), drawn.to(where), drawn.unique().tolist())

    def routings(self, case: Case, layers: int) -> list[Routing]:
        """One for each layer."""
        return [self.routing(case, seed) for seed in range(layers)]

    def floors(self, missing: float, distinct: float) -> list[str]:
        """ms a layer at least, by what is copied and by what is read."""
        nbytes = self.engine.record.record_nbytes
        return [f"{1e3 * missing * nbytes / self.rates.link:.3f}", f"{1e3 * distinct * nbytes / self.rates.memory:.3f}"]


# Events -------------------------------------------------------------------------------------------------------------


def mark() -> Any:
    """Where the stream is now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def ms_between(begin: Any, end: Any) -> float:
    """Both are over."""
    return float(begin.elapsed_time(end))


def link_and_memory(record_nbytes: int) -> Rates:
    """Large neighbouring copies from pinned memory, and what bench_kernels measures of the device's."""
    source = torch.empty(LINK_RECORDS * record_nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    marks = []
    for _ in range(8):
        begin = mark()
        target.copy_(source, non_blocking=True)
        marks.append((begin, mark()))
    torch.cuda.synchronize()
    best = min(ms_between(*pair) for pair in marks[2:])
    return Rates(source.nbytes / best * 1e3, ceilings().bytes_per_s)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what `work` enqueues, as the worker captures its own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


# Steps --------------------------------------------------------------------------------------------------------------


def run_step(pool: Pool, mode: Mode, given: Sequence[Routing]) -> tuple[Sample, list[torch.Tensor]]:
    """One step over the first layers, and what they give."""
    pool.awaken()
    begin, start = mark(), time.perf_counter()
    with pool.step(mode):
        outs = [pool.slots(layer, *routing[:3]) for layer, routing in enumerate(given)]
        end, host_s = mark(), time.perf_counter() - start
    return Sample(ms_between(begin, end) / len(given), 1e3 * host_s / len(given)), outs


def forget_some(pool: Pool, given: Sequence[Routing], missing: int | None, rng: random.Random) -> int:
    """Forget that many of each layer's experts, or all; how many in all."""
    total = 0
    for layer, routing in enumerate(given):
        gone = (
            routing.distinct if missing is None else rng.sample(routing.distinct, min(missing, len(routing.distinct)))
        )
        pool.forget(layer, gone)
        total += len(gone)
    return total


def sampled(count: int, sample: Callable[[], Sample]) -> list[Sample]:
    """`count` of them after some to warm up."""
    return [sample() for _ in range(WARM_UP + count)][WARM_UP:]


def spread(times: Sequence[float]) -> str:
    """ms: median (min-max)."""
    if not times:
        return ""
    digits = 4 if statistics.median(times) < 1 else 2
    return f"{statistics.median(times):.{digits}f} ({min(times):.{digits}f}-{max(times):.{digits}f})"


def on_demand(bench: Bench, case: Case, query: int) -> list[str]:
    """A row: the missing ones are others each time."""
    given = bench.routings(case, bench.engine.layers)
    rng = random.Random(1)

    def sample(layers: int) -> Sample:
        pool = bench.pool(query, bench.engine.layers)
        expected = forget_some(pool, given[:layers], case.missing, rng)
        taken, _ = run_step(pool, "demand", given[:layers])
        assert pool.misses == expected, f"{pool.misses} misses, not {expected}"
        return taken

    chain = sampled(bench.options.samples, lambda: sample(len(given)))
    alone = sampled(bench.options.samples, lambda: sample(1))
    return cells(bench, case, query, given, case.missing, chain, alone)


def streamed(bench: Bench, case: Case, query: int, layers: int) -> list[str]:
    """A row. One layer alone takes slots for one layer, since a streamed step asks for all of its layers."""
    given = bench.routings(case, layers)
    pool = bench.pool(query, layers)
    pool.fill(bench.engine.k)
    rng, missing = random.Random(2), bench.engine.experts if case.missing is None else case.missing
    for layer in range(layers):
        pool.forget(layer, rng.sample(range(bench.engine.experts), missing))

    def sample() -> Sample:
        taken, _ = run_step(pool, "streamed", given)
        assert pool.misses == layers * missing, f"{pool.misses} misses, not {layers * missing}"
        return taken

    samples = sampled(bench.options.samples, sample)
    return cells(bench, case, query, given, missing, *((samples, []) if layers > 1 else ([], samples)))


def decode(bench: Bench, case: Case, query: int) -> list[str]:
    """A row: replays of a graph over all layers, and of one over the first alone, queued behind a sleep."""
    given = bench.routings(case, bench.engine.layers)
    pool = bench.pool(query, bench.engine.layers)

    def replays(layers: int) -> list[Sample]:
        def work() -> None:
            for layer, routing in enumerate(given[:layers]):
                pool.slots(layer, *routing[:3])

        rng = random.Random(3)
        with pool.step("decode"):
            work()  # compiles
        with pool.step("decode"):
            graph = captured(work)

        def sample() -> Sample:
            expected = forget_some(pool, given[:layers], case.missing, rng)
            pool.awaken()
            start = time.perf_counter()
            with pool.step("decode"):
                sleep()
                begin = mark()
                graph.replay()
                end, host_s = mark(), time.perf_counter() - start
            assert pool.misses == expected, f"{pool.misses} misses, not {expected}"
            return Sample(ms_between(begin, end) / layers, 1e3 * host_s / layers)

        return sampled(bench.options.samples, sample)

    return cells(bench, case, query, given, case.missing, replays(len(given)), replays(1))


def sleep() -> None:
    """Longer than the host needs to queue a replay."""
    torch.cuda._sleep(SLEEP_CYCLES)


def cells(
    bench: Bench,
    case: Case,
    query: int,
    given: Sequence[Routing],
    missing: int | None,
    chain: Sequence[Sample],
    alone: Sequence[Sample],
) -> list[str]:
    """One row under HEAD."""
    distinct = statistics.mean(len(routing.distinct) for routing in given)
    gone = distinct if missing is None else missing
    return [
        case.name,
        f"{case.tokens:,}",
        str(query),
        f"{distinct:.0f}",
        f"{gone:.0f}",
        spread([sample.ms for sample in chain]),
        spread([sample.ms for sample in alone]),
        f"{statistics.median(sample.host_ms for sample in chain or alone):.3f}",
        *bench.floors(gone, distinct),
        *("" if ms is None else f"{ms:g}" for ms in (case.peer, case.target)),
    ]
