"""The data plane of a GPU, whole: rates, latencies, and what the worker keeps of its speed, over a copy engine process.

`python -m tests.bench.bench_copies [--out FILE]` from the repository's root, on a machine with a GPU; about a minute.
`--loop` measures the copy loop alone, without a GPU. A record is one expert of Qwen3.8-Flash-Next, 2,764,800 bytes.
This process is the worker: it rings from the host, and a stream of its waits for the flags; a time is from the first
record in the ring until the host sees that the stream is through, which takes some µs by itself (the empty query).
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from copyengine.device.cuda import CudaCopyDevice
from copyengine.device.cuda_link import BATCH_RUNS
from copyengine.device.cuda_worker import CudaWorkerDevice
from copyengine.device.probe import cuda_devices
from copyengine.ring import CopyQuery, Kind
from kernels.formats import layout
from tests.bench import copy_loop
from tests.bench.bench_pinning import cuda_conditions
from tests.bench.flash_next import FULL, config
from tests.bench.report import conditions, table
from tests.copyengine.cuda_rig import WAIT_S, CudaEngine, CudaWorker

EXPERTS, SLOTS, FLAGS = 512, 1_024, 32
SIZES = replace(FULL, layers=1)
TINY = replace(FULL, layers=1, hidden=128, intermediate=64)
"""Records of 14 kB: whether all of it works, on a driver that is none."""

REPEATS = 20
STREAM_S = 1.0
COMPUTE_S = 1.5

ENGINE = "import sys, copyengine.device.cuda_link as link\nlink.BATCH_RUNS = {}\n"
ENGINE += "from copyengine.__main__ import main\nsys.exit(main(sys.argv[1:]))"
"""A copy engine with its threshold moved."""

Query = tuple[Sequence[int], Sequence[int]]


def main() -> None:
    """Measure, print, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file for the results")
    parser.add_argument("--loop", action="store_true", help="the copy loop alone, no GPU")
    parser.add_argument("--tiny", action="store_true", help="small records and no computing: does it work at all?")
    options = parser.parse_args()
    start = time.monotonic()
    parts = [*loop_part()] if options.loop else [*gpu_parts(options.tiny)]
    under = conditions(packages=("numpy",)) if options.loop else cuda_conditions(cuda_devices()[0].name, PACKAGES)
    text = "\n\n".join((f"# Copies into the slot pool\n\n{under}", *parts))
    print(f"{text}\n\nThe whole run: {time.monotonic() - start:.0f} s.")
    if options.out:
        options.out.write_text(text + "\n", "utf-8")


PACKAGES = ("cuda-bindings", "torch", "numpy")
COMPUTE_HEAD = ("worker computes", "alone", "while copies run", "keeps", "copies, GB/s")
LOOP_HEAD = ("records", "layout", "to the first copy, µs", "to the flag, µs", "per further record, µs")


def loop_part() -> Iterator[str]:
    """The copy loop, for a device that takes no time."""
    yield "## The copy loop by itself\n\n" + table(LOOP_HEAD, copy_loop.rows_without_device())
    yield f"A round that finds nothing: {copy_loop.idle_loop_us():.1f} µs, beside its pause."


def gpu_parts(tiny: bool) -> Iterator[str]:
    """All that needs a GPU; printed to standard error as it comes, for a run that is cut short."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config(TINY if tiny else SIZES)))
        for part in itertools.chain(loop_part(), _measured(directory, tiny)):
            print(part, file=sys.stderr, flush=True)
            yield part


def _measured(model: str, tiny: bool) -> Iterator[str]:
    sizes = TINY if tiny else SIZES
    record_nbytes = layout("nvfp4", sizes.hidden, sizes.intermediate).record_nbytes
    yield "## The copy loop with the driver's calls\n\n" + table(LOOP_HEAD, driver_rows(record_nbytes))
    rates: dict[str, list[str]] = {}
    for batch_runs in (10**9, 2):
        with serving(model, record_nbytes, batch_runs) as (_, worker):
            for name, rate in transfer_rates(worker):
                rates.setdefault(name, []).append(rate)
    head = ("records", "one by one, GB/s", "in batches, GB/s")
    yield "## Demand queries, from the ring to the flag\n\n" + table(head, [(n, *r) for n, r in rates.items()])
    with serving(model, record_nbytes, BATCH_RUNS) as (engine, worker):
        yield "## Latency\n\n" + table(("query", "median, µs", "least", "most"), [*latency_rows(worker)])
        yield "## Streaming\n\n" + table(("what", "figure"), [*stream_rows(engine, worker)])
        if not tiny:
            yield "## Copies while the worker computes\n\n" + table(COMPUTE_HEAD, [*compute_rows(worker)])
        if len(cuda_devices()) > 1:
            yield "## Two GPUs\n\n" + table(("GPUs", "GB/s"), [*two_gpu_rows(engine, worker)])


@contextmanager
def serving(model: str, record_nbytes: int, batch_runs: int) -> Iterator[tuple[CudaEngine, CudaWorker]]:
    """A copy engine that has `model`, and a worker that it serves."""
    with CudaEngine("--log-level", "warning", start=("-c", ENGINE.format(batch_runs))) as engine:
        engine.load(model, load_format="dummy")
        worker = CudaWorker("w", record_nbytes, SLOTS, FLAGS)
        worker.attach(engine)
        yield engine, worker
        engine.run(engine.client.detach("w"))
        worker.close()


def queries(records: int, neighbouring: bool) -> list[Query]:
    """Distinct slots and, in each query, distinct experts; at least one query, as many records in each."""
    count = max(1, -(-records // 128))
    n = records // count
    step = 1 if neighbouring else EXPERTS // max(n, 1)
    experts = range(0, n * step, step)
    return [(experts, range(i * n, (i + 1) * n)) for i in range(count)]


def landed_s(worker: CudaWorker, asked: Sequence[Query], kind: Kind = "demand", first_flag: int = 0) -> float:
    """Seconds from the first record in the ring until a stream that waits for all flags is seen to be through."""
    device = worker.device
    driver = device._driver
    device.write_words(worker.flag_address(first_flag), 0, len(asked))
    for i in range(len(asked)):
        device.wait_flag(int(worker.stream), worker.flag_address(first_flag + i))
    driver.record(worker.event, worker.stream)
    rung = [CopyQuery(first_flag + i, kind, 0, tuple(e), tuple(s)) for i, (e, s) in enumerate(asked)]
    start = time.perf_counter()
    for query in rung:
        worker.writer.put(query, WAIT_S, lambda: None)
    while not driver.has_happened(worker.event):
        pass
    return time.perf_counter() - start


# Tables -------------------------------------------------------------------------------------------------------------


def driver_rows(record_nbytes: int) -> list[tuple[str, ...]]:
    """copy_loop's, in this process, over the GPU."""
    device, worker = CudaCopyDevice(0, local=True), CudaWorkerDevice(0, local=True)
    bank = device.allocate_bank("bench", "bank", copy_loop.SLOTS * record_nbytes)
    pool, flags = worker.allocate(copy_loop.SLOTS * record_nbytes), worker.allocate(4)
    theirs = device.open(pool.handle), device.open(flags.handle)
    rows = copy_loop.copy_loop_rows(device, bank, *theirs, record_nbytes, repeats=40)
    for memory in (*theirs, pool, flags, bank, worker, device):
        memory.close()
    return rows


def transfer_rates(worker: CudaWorker) -> Iterator[tuple[str, str]]:
    """(records and layout, GB/s), each the median of some repetitions."""
    for records in (1, 8, 32, 128, 1_000):
        for where in ("scattered", "neighbouring"):
            asked = queries(records, where == "neighbouring")
            nbytes = sum(len(e) for e, _ in asked) * worker.record_nbytes
            took = [landed_s(worker, asked) for _ in range(REPEATS if records < 1_000 else 5)]
            yield f"{records:,} {where}", f"{nbytes / statistics.median(took[2:]) / 1e9:.1f}"


def latency_rows(worker: CudaWorker) -> Iterator[tuple[str, ...]]:
    """Queries of few records, nothing else on the link; and while the engine streams for nobody who waits."""
    for n in (0, 1, 3, 10, 32, 128):
        yield latency_row(f"{n} records", worker, n)


def latency_row(name: str, worker: CudaWorker, n: int) -> tuple[str, ...]:
    """Of demand queries of n scattered records."""
    took = [landed_s(worker, queries(n, False), "demand", 31) * 1e6 for _ in range(50)][5:]
    return name, f"{statistics.median(took):.0f}", f"{min(took):.0f}", f"{max(took):.0f}"


class Streaming:
    """A thread that keeps stream queries of 128 neighbouring records under way, over flags 0 to 3."""

    def __init__(self, worker: CudaWorker) -> None:
        self._worker = worker
        self._stop = threading.Event()
        self._landed = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Streaming":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def landed(self) -> tuple[float, int]:
        """The time, and the bytes that have landed by now."""
        return time.perf_counter(), self._landed

    def _run(self) -> None:
        rounds = 0
        nbytes = 128 * self._worker.record_nbytes
        while not self._stop.is_set() or rounds % 4:
            flag = rounds % 4
            if rounds >= 4:
                self._wait(flag)
                self._landed += nbytes
            if not self._stop.is_set():
                first = flag * 128
                self._worker.put(flag, "stream", 0, range(first, first + 128), range(first, first + 128))
            rounds += 1
        for flag in range(4):
            self._wait(flag)

    def _wait(self, flag: int) -> None:
        """By looking now and then, which leaves the interpreter to whoever computes."""
        while not self._worker.device.read_words(self._worker.flag_address(flag), 1)[0]:
            time.sleep(2e-4)


def rate(streams: Sequence[Streaming], seconds: float, work: Callable[[], object] | None = None) -> float:
    """GB/s that land while `work` runs, or for `seconds`."""
    time.sleep(0.05)
    before = [stream.landed() for stream in streams]
    if work is None:
        time.sleep(seconds)
    else:
        work()
    after = [stream.landed() for stream in streams]
    return sum((b - a) / (t - s) / 1e9 for (s, a), (t, b) in zip(before, after, strict=True))


def stream_rows(engine: CudaEngine, worker: CudaWorker) -> Iterator[tuple[str, str]]:
    """Alone on the link, where a piece is a query; with a second worker, where it is a record; that one's demand."""
    with Streaming(worker) as streaming:
        yield "a worker alone on the link: pieces of 128 neighbours", f"{rate([streaming], STREAM_S):.1f} GB/s"
    other = CudaWorker("other", worker.record_nbytes, SLOTS, FLAGS)
    other.attach(engine)
    with Streaming(worker) as streaming:
        yield "two workers on it: pieces of one record", f"{rate([streaming], STREAM_S):.1f} GB/s"
        for n in (1, 10):
            _, median, least, most = latency_row("", other, n)
            yield f"demand of {n} by the other meanwhile", f"{median} µs ({least}-{most})"
    engine.run(engine.client.detach("other"))
    other.close()


def two_gpu_rows(engine: CudaEngine, worker: CudaWorker) -> Iterator[tuple[str, str]]:
    """One bank, pinned once, to either GPU and to both."""
    other = CudaWorker("second", worker.record_nbytes, SLOTS, FLAGS, ordinal=1)
    other.attach(engine)
    for name, workers in (("first", [worker]), ("second", [other]), ("both", [worker, other])):
        streams = [Streaming(one).__enter__() for one in workers]
        yield name, f"{rate(streams, STREAM_S):.1f}"
        for stream in streams:
            stream.__exit__()
    engine.run(engine.client.detach("second"))
    other.close()


def compute_rows(worker: CudaWorker) -> Iterator[tuple[str, ...]]:
    """Rates of three loads on the worker's GPU, alone and beside copies."""
    for name, unit, amount, launch in loads():
        alone = compute_rate(launch) * amount
        with Streaming(worker) as streaming:
            beside = 0.0

            def work(launch: Callable[[], object] = launch, amount: float = amount) -> None:
                nonlocal beside
                beside = compute_rate(launch) * amount

            copied = rate([streaming], 0, work)
        yield name, f"{alone:.0f} {unit}", f"{beside:.0f} {unit}", f"{beside / alone:.0%}", f"{copied:.1f}"


def loads() -> Iterator[tuple[str, str, float, Callable[[], object]]]:
    """Name, unit, amount of the unit (per second) in one launch, launch."""
    import torch

    a, b, c = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    yield "8192^3 bf16 matmul", "TFLOP/s", 2 * 8192**3 / 1e12, lambda: torch.mm(a, b, out=c)
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    yield "copies in HBM", "GB/s", 2 * source.numel() / 1e9, lambda: target.copy_(source)
    x, y, z = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.mm(x, y, out=z)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            torch.mm(x, y, out=z)
    yield "stream of 512^3 matmuls", "thousand/s", 0.2, graph.replay


def compute_rate(launch: Callable[[], object]) -> float:
    """Launches a second, of as many as take about COMPUTE_S, always some in the queue."""
    import torch

    launch()
    torch.cuda.synchronize()
    events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
    start, launches = time.perf_counter(), 0
    while time.perf_counter() - start < COMPUTE_S:
        event = events[launches // 8 % 2]
        for _ in range(8):
            launch()
        launches += 8
        event.record()
        events[launches // 8 % 2].synchronize()  # of the eight before
    torch.cuda.synchronize()
    return launches / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
