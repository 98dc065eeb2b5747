"""How fast experts are read into their banks, beside plain reads of the same files to the same place by as many
threads.

`python -m tests.bench.bench_loading [--gb 2] [--device cuda] [--directory DIR] --keep` from the repository's root. The
files are written into DIR (a temporary folder) first. Cold: the page cache was told to let go of them. Banks have been
written to before, as they have when the copy engine reads into them; on `--device cuda` they are pinned. Orders change
from round to round, and the median counts. Whether files are read past the page cache (copyengine/checkpoint/direct.py)
follows from this. The mark: within 20 % of plain reads.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from pathlib import Path

import numpy as np
import psutil
from msgspec.structs import replace
from numpy.typing import NDArray

from copyengine.checkpoint.model import Model, open_model
from copyengine.checkpoint.parallel import run_all
from copyengine.checkpoint.random_model import Sizes
from copyengine.checkpoint.reader import BATCH_NBYTES, READER_THREADS, read_experts
from copyengine.device import CopyDevice
from copyengine.device.host import HostCopyDevice
from copyengine.protocol import Dtype
from copyengine.records import record_layout
from tests.bench import report
from tests.copyengine.sparse_checkpoint import write_sparse_checkpoint

SIZES = Sizes(
    hidden=2048, intermediate=768, experts=32, experts_per_token=8, heads=2, kv_heads=1, vocab_size=64, shards=1 << 20
)
"""Qwen3-30B-A3B's experts, a quarter of a layer's: 302 MB of bfloat16, a shard for each layer."""

CASES: tuple[tuple[str, bool, Dtype], ...] = (
    ("bfloat16", False, "bfloat16"),
    ("bfloat16", True, "bfloat16"),
    ("float32", False, "bfloat16"),
)
"""Stored as, as NVFP4, loaded as."""

Arrays = list[NDArray[np.uint8]]
Way = Callable[[], int]


def main() -> None:
    """Measure all cases, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="of files in each case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--directory", type=Path, help="where the files go: on the disk that is measured")
    parser.add_argument("--keep", action="store_true", help="write the result file")
    options = parser.parse_args()
    device = open_device(options.device)
    rows: list[tuple[str, ...]] = []
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            for row in measure(device, Path(folder), case, options.gb, options.rounds):
                rows.append(row)
                print(" | ".join(row), flush=True)
    device.close()
    name = report.gpu_name() if options.device == "cuda" else ""
    machine = f"{name}, driver {report.gpu_driver()}, {os.cpu_count()} cores" if name else ""
    load = f"- load: {os.getloadavg()[0]:.1f} processes at the end" if hasattr(os, "getloadavg") else ""
    text = "\n".join(
        ("# Loading experts", "", report.conditions(machine, ("numpy", "ml-dtypes")), load, "", table(rows))
    )
    print(text)
    if options.keep:
        report.path_of("loading", name).write_text(text + "\n", "utf-8")


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """With its head."""
    head = ("files, and what is loaded", "page cache", *(f"{name}, GB/s" for name in WAYS), "of plain, %")
    notes = f"Bytes of the files a second, {READER_THREADS} threads. Of plain: the better one of each pair."
    return f"{report.table(head, rows)}\n\n{notes}"


WAYS = ("plain, cached", "plain, direct", "experts, cached", "experts, direct")


def open_device(name: str) -> CopyDevice:
    """Whose banks are read into."""
    if name == "cpu":
        return HostCopyDevice()
    from copyengine.device.cuda import CudaCopyDevice

    return CudaCopyDevice()


def measure(
    device: CopyDevice, folder: Path, case: tuple[str, bool, Dtype], gb: float, rounds: int
) -> list[tuple[str, ...]]:
    """One case's rows: cold and warm."""
    stored, quantised, dtype = case
    per_layer = 3 * SIZES.experts * SIZES.hidden * SIZES.intermediate * (4 if stored == "float32" else 2)
    layers = max(1, round(gb * 1e9 / (per_layer * (0.28125 if quantised else 1))))
    paths = write_sparse_checkpoint(folder / "model", replace(SIZES, layers=layers), stored, quantised)
    for path in paths:
        fill(path)
    model = open_model(folder / "model")
    record = record_layout(model.spec, dtype)
    assert record is not None
    banks = [device.allocate_bank("bench", f"bank{i}", SIZES.experts * record.record_nbytes) for i in range(layers)]
    for bank in banks:
        bank.array.fill(1)
    arrays = [bank.array.reshape(SIZES.experts, record.record_nbytes) for bank in banks]
    ways = ways_of(model, paths, arrays, [bank.array for bank in banks], dtype)
    label = f"{'NVFP4' if quantised else stored}, {sum(path.stat().st_size for path in paths) / 1e9:.1f} GB as {dtype}"
    rows = [row(label, cold, paths, ways, rounds) for cold in (True, False)]
    del arrays, ways
    for bank in banks:
        bank.close()
    return rows


def ways_of(model: Model, paths: Sequence[Path], arrays: Arrays, flat: Arrays, dtype: Dtype) -> list[Way]:
    """In the order of WAYS; each returns the bytes it has read."""
    record = record_layout(model.spec, dtype)
    assert record is not None
    return [
        partial(plain, paths, flat, False),
        partial(plain, paths, flat, True),
        lambda: read_experts(model, record, arrays, lambda _: None, direct=False),
        lambda: read_experts(model, record, arrays, lambda _: None, direct=True),
    ]


def fill(path: Path) -> None:
    """Give a sparse file its blocks: bytes below 64 behind its header, which make no NaN in any format."""
    block = np.random.default_rng(0).integers(0, 64, 8 << 20, np.uint8).tobytes()
    size = path.stat().st_size
    with open(path, "r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        for at in range(start, size, len(block)):
            file.seek(at)
            file.write(block[: size - at])
        file.flush()
        os.fsync(file.fileno())


def plain(paths: Sequence[Path], targets: Arrays, direct: bool) -> int:
    """Whole files in pieces of BATCH_NBYTES, into the banks' memory one after the other, as dd would."""
    spans = [(path, at) for path in paths for at in range(0, path.stat().st_size, BATCH_NBYTES)]
    room = [(target, at) for target in targets for at in range(0, target.size - BATCH_NBYTES + 1, BATCH_NBYTES)]

    def read(i: int, path: Path, at: int) -> int:
        target, start = room[i % len(room)]
        with FileIO(os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))) as file:
            file.seek(at)
            return file.readinto(target[start : start + BATCH_NBYTES].data) or 0

    return sum(run_all([partial(read, i, *span) for i, span in enumerate(spans)], READER_THREADS, "plain"))


def row(label: str, cold: bool, paths: Sequence[Path], ways: Sequence[Way], rounds: int) -> tuple[str, ...]:
    """Rates of all ways."""
    rates: list[list[float]] = [[] for _ in ways]
    for number in range(rounds):
        order = list(range(len(ways)))
        for i in order[number % len(order) :] + order[: number % len(order)]:
            settle(paths, cold)
            start = time.perf_counter()
            nbytes = ways[i]()
            rates[i].append(nbytes / 1e9 / (time.perf_counter() - start))
    medians = [statistics.median(each) for each in rates]
    share = max(medians[2:]) / max(medians[:2])
    return label, "cold" if cold else "warm", *(f"{rate:.2f}" for rate in medians), f"{share:.0%}".rstrip("%")


def settle(paths: Sequence[Path], cold: bool) -> None:
    """Have the files out of the page cache, or in it."""
    for path in paths:
        if cold:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        else:
            with open(path, "rb", buffering=0) as file:
                while file.read(8 << 20):
                    pass


if __name__ == "__main__":
    assert psutil.LINUX, "the page cache is emptied by posix_fadvise"
    main()
