"""One MoE layer's data plane on one GPU: on demand, streamed and as a decode graph, beside a peer, targets and floors.

`python -m tests.bench.bench_layer --out layer.md [--query 32,64,128] [--profile]` from the repository's root, on a
machine with an H200: two to four minutes. A real copy engine in a process of its own copies made-up NVFP4 experts in
Flash-Next's geometry into the slots of this process; a layer is all that comes after its router. A step's time is that
between two events, from before the step begins, in a stream that is idle; the copy engine is awake. Graphs are queued
behind a sleep.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from copyengine.query import query_experts
from tests.bench.layer_cases import DECODE, DEMAND, LAYERS, SHARES, SLOTS, STREAMED_PEER_MS, STREAMED_TARGET_MS, Case
from tests.bench.layer_profile import profiled
from tests.bench.layer_rig import CopyEngine, Pool
from tests.bench.layer_times import HEAD, Bench, captured, decode, forget_some, on_demand, run_step, streamed
from tests.bench.report import gpu_conditions, table
from worker.cuda_backend import CudaBackend

SECTIONS = ("demand", "streamed", "decode")


# Checks -------------------------------------------------------------------------------------------------------------


def check(bench: Bench, queries: Sequence[int]) -> Iterator[str]:
    """Every layer's output has the same bits on demand with all missing, with some, resident, and streamed."""
    for tokens in bench.options.check_tokens:
        given = bench.routings(Case("", tokens, 0.0, None, None), bench.engine.layers)
        expected: list[torch.Tensor] = []
        for query in queries:
            pool = bench.pool(query, bench.engine.layers)
            rng = random.Random(4)
            for mode, missing in (("demand", None), ("streamed", None), ("demand", 7), ("demand", 0), ("streamed", 0)):
                forget_some(pool, given, missing, rng)
                outs = run_step(pool, "streamed" if mode == "streamed" else "demand", given)[1]
                expected = expected or outs
                assert all(bool(out.isfinite().all()) and bool(out.any()) for out in outs), f"{mode}: no numbers"
                assert all(map(torch.equal, outs, expected)), f"{mode}, T {tokens}, query {query}, missing {missing}"
                pool.fill(bench.engine.k)
    yield f"equal bits at T {bench.options.check_tokens}, queries of {list(queries)}: on demand, streamed, resident"


# The whole ----------------------------------------------------------------------------------------------------------


class Report:
    """Prints what comes, and writes the file anew after each section."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._parts: list[str] = []
        self._start = time.monotonic()
        out.parent.mkdir(parents=True, exist_ok=True)

    @property
    def elapsed_s(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """A line or a paragraph of the file."""
        print(text, flush=True)
        self._parts.append(text)
        self._out.write_text("\n".join(self._parts) + "\n", "utf-8")

    def section(self, bench: Bench, title: str, rows: "Sequence[Row]") -> None:
        """A table of all rows that can be had; what is wrong with the others is below it."""
        done: list[list[str]] = []
        failures: list[str] = []
        for name, measured in rows:
            if self.elapsed_s > bench.options.limit_s:
                failures.append(f"- {name}: out of time")
                continue
            try:
                done.append(measured())
                print(f"[{self.elapsed_s:.0f} s] {' | '.join(done[-1])}", flush=True)
            except Exception as error:  # whatever it is, the other rows are worth having
                failures.append(f"- {name}: {type(error).__name__}: {error}")
                print(failures[-1], flush=True)
                guarded(bench.close_pools)
        self.say("\n".join((f"\n## {title}\n", table(HEAD, done), "", *failures)))
        self.say(f"\n[{self.elapsed_s:.0f} s]")


def guarded(work: Callable[[], object]) -> None:
    """Do it, or say why not."""
    try:
        work()
    except Exception as error:  # after another one, which was told
        print(f"{type(error).__name__}: {error}", flush=True)


@contextmanager
def rig(options: argparse.Namespace) -> Iterator[Bench]:
    """Everything started, and ended again."""
    backend = CudaBackend(0, local=False)
    engine = CopyEngine(options.layers, checksums=options.verify_copies)
    try:
        bench = Bench(options, backend, engine)
        try:
            yield bench
        finally:
            guarded(bench.close_pools)
    finally:
        guarded(engine.close)
        guarded(backend.close)


Row = tuple[str, Callable[[], list[str]]]
"""Its name, in case it fails, and what measures it."""


def sections(bench: Bench, queries: Sequence[int]) -> Iterator[tuple[str, list[Row]]]:
    """Titles and rows."""
    wanted, layers = bench.options.sections, bench.engine.layers
    for query in queries:
        if "demand" in wanted:
            yield f"On demand, queries of {query}", [row(on_demand, bench, case, query) for case in DEMAND]
        if "streamed" in wanted:
            cases = list(streamed_cases(bench.engine.experts))
            rows = [row(streamed, bench, case, query, layers) for case in cases]
            rows += [row(streamed, bench, case, query, 1) for case in cases if case.missing is None]
            yield f"Streamed, groups of {query}", rows
    if "decode" in wanted:
        yield "Decode, as a graph", [row(decode, bench, case, queries[0]) for case in DECODE]


def streamed_cases(experts: int) -> Iterator[Case]:
    """All tokens and shares; the peer and the targets have nothing resident."""
    for tokens, peer in STREAMED_PEER_MS.items():
        yield Case("nothing resident", tokens, 0.0, None, None, peer, STREAMED_TARGET_MS[tokens])
        for share in SHARES:
            yield Case(f"{share} % resident", tokens, 0.0, None, experts - experts * share // 100)


def row(measured: Callable[..., list[str]], bench: Bench, case: Case, *sizes: int) -> Row:
    """One row, not measured yet."""
    return f"{case.name}, T {case.tokens}, missing {case.missing}, {sizes}", partial(measured, bench, case, *sizes)


def conditions(bench: Bench) -> str:
    """Command, GPU, versions, commit, shapes and rates."""
    engine, rates = bench.engine, bench.rates
    record = engine.record
    return (
        f"{gpu_conditions(torch.cuda.get_device_name())}\n"
        f"- H {record.hidden}, I {record.intermediate}, E {engine.experts}, K {engine.k}, {record.format}, "
        f"{record.record_nbytes:,} bytes an expert, {bench.options.slots} slots, {engine.layers} layers; "
        f"ms: median (min-max) of {bench.options.samples}\n"
        f"- link {rates.link / 1e9:.1f} GB/s, memory {rates.memory / 1e12:.2f} TB/s; banks filled and pinned in "
        f"{engine.loaded.load_s:.1f} s"
    )


def profile_of(bench: Bench, case: Case, query: int) -> str:
    """Where the time of one layer goes, on demand or as a decode graph."""
    pool = bench.pool(query, bench.engine.layers)
    given = bench.routings(case, 1)
    run_step(pool, "demand", given)  # compiles, and makes all of it resident
    if case in DEMAND:
        work: Callable[[], object] = partial(run_step, pool, "demand", given)
    else:
        with pool.step("decode"):
            graph = captured(partial(pool.slots, 0, *given[0][:3]))
        work = partial(replay, pool, graph)
    forget_some(pool, given, case.missing, random.Random(5))
    return profiled(work)


def replay(pool: Pool, graph: torch.cuda.CUDAGraph) -> None:
    """A decode step."""
    pool.awaken()
    with pool.step("decode"):
        graph.replay()


def measure(bench: Bench, report: Report) -> None:
    """All that was asked for."""
    queries = bench.options.query or [query_experts(bench.engine.experts)]
    report.say(f"# One MoE layer's data plane\n\n{conditions(bench)}\n")
    try:
        for line in check(bench, queries):
            report.say(f"- {line} [{report.elapsed_s:.0f} s]")
    except Exception as error:  # the times are worth having all the same
        report.say(f"- **check failed**: {type(error).__name__}: {error}")
        guarded(bench.close_pools)
    for title, rows in sections(bench, queries):
        report.section(bench, title, rows)
    counters = bench.engine.stats()
    report.say(f"\nCopy engine: demand {counters.demand}, stream {counters.stream}, bad {counters.malformed_records}.")
    if bench.options.profile:
        report.say("\n## Profile")
        for case in (DEMAND[2], DEMAND[1], *DECODE[:2]):
            try:
                seen = profile_of(bench, case, queries[0])
            except Exception as error:  # the other profiles are worth having
                seen = f"{type(error).__name__}: {error}"
            report.say(f"\n### {case.name}, T {case.tokens}, missing {case.missing}\n\n{seen}")
    report.say(f"\nThe whole run: {report.elapsed_s:.0f} s.")


def numbers(text: str) -> list[int]:
    """The whole numbers in a comma-separated list."""
    return [int(part) for part in text.split(",") if part]


def main(argv: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Markdown file for the results")
    parser.add_argument("--query", type=numbers, default=[], help="experts of a query; default the engine's choice")
    parser.add_argument("--sections", type=lambda text: text.split(","), default=SECTIONS, help=",".join(SECTIONS))
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--check-tokens", type=numbers, default=[1, 16, 128, 1024, 4096])
    parser.add_argument("--verify-copies", action="store_true", help="what the engine's flag of this name costs")
    parser.add_argument("--profile", action="store_true", help="kernels by time, and one after the other")
    parser.add_argument("--limit-s", type=float, default=230, help="no row is begun after this")
    options = parser.parse_args(argv)
    report = Report(options.out)
    with rig(options) as bench:
        measure(bench, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
