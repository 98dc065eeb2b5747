"""What a soak watches of an engine's processes while it runs, and whether any of it grows."""

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.bench.bench_idle import processes
from tests.bench.report import gpu_nbytes
from tests.e2e.engine import Engine, own_nbytes

WARM_MARGIN_S = 30.0
"""A series begins with its first sample and ends with its last, which is less than the process's life."""

BLOCKS = 12
"""Means that a line is fitted through: samples that follow each other are alike, so that each by itself would claim
more certainty than it has; means of a twelfth of the watched time are nearly independent."""

T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Student's t, two-sided 95 %, of 1 to 10 degrees of freedom."""

WARM_S = 600.0
"""Seconds that a process has to have lived for its slopes to be judged. What it grows by before is its warming up: a
worker on a CPU has met as many shapes as it keeps code of after some minutes, and a scheduler has come from 38 to 44 MB
after ten, and by 4 more over the next fifty (2-core AMD EPYC, 2026-11)."""

ALLOWED = {"private": 0.01, "fds": 0.0, "threads": 0.0, "shm": 0.01, "gpu": 0.01}
"""By what share of its mean a figure may surely have grown over the watched half."""

ALLOWED_MORE = {"private": 1 << 20, "fds": 4.0, "threads": 2.0, "shm": 0.0, "gpu": 32 << 20}
"""And by how much beside that: less than a page of the allocator is no growth, and under load some clients more or
fewer are connected; after the load files are counted exactly."""

Key = tuple[str, str, int]
"""Process, figure, and pid: a process that was started anew begins anew."""


@dataclass
class Series:
    """Values of one figure over time, in seconds since the start."""

    at_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Slope:
    """A line fitted through the second half of a series; `low` and `high` bound its growth there with 95 %."""

    mean: float
    growth: float
    low: float
    high: float
    watched_s: float

    def grows(self, share: float, more: float) -> bool:
        """Whether it has surely grown by more than is allowed."""
        return self.low > share * abs(self.mean) + more


def slope(series: Series) -> Slope | None:
    """Of the second half of its time; None with too few values."""
    if len(series.at_s) < 2 * BLOCKS:
        return None
    middle = (series.at_s[0] + series.at_s[-1]) / 2
    half = [(at, value) for at, value in zip(series.at_s, series.values, strict=True) if at >= middle]
    blocks = min(BLOCKS, len(half) // 2)
    if blocks < 4:
        return None
    cuts = [len(half) * i // blocks for i in range(blocks + 1)]
    xs = [statistics.fmean(at for at, _ in half[a:b]) for a, b in itertools.pairwise(cuts)]
    ys = [statistics.fmean(value for _, value in half[a:b]) for a, b in itertools.pairwise(cuts)]
    rate, intercept = statistics.linear_regression(xs, ys)
    rest = sum((y - intercept - rate * x) ** 2 for x, y in zip(xs, ys, strict=True)) / (blocks - 2)
    spread = math.sqrt(rest / sum((x - statistics.fmean(xs)) ** 2 for x in xs))
    watched_s = half[-1][0] - half[0][0]
    t = T_975[blocks - 3]
    low, high = rate - t * spread, rate + t * spread
    return Slope(statistics.fmean(ys), rate * watched_s, low * watched_s, high * watched_s, watched_s)


class Sampler:
    """Takes samples of one engine's processes."""

    def __init__(self, engine: Engine, gpu: bool) -> None:
        self.series: defaultdict[Key, Series] = defaultdict(Series)
        self._engine = engine
        self._gpu = gpu
        self._start_s = time.monotonic()

    def sample(self) -> None:
        """One of each figure. A process that ends meanwhile has none."""
        for name, process in self._alive().items():
            try:
                memory = process.memory_full_info()
                figures = {
                    "private": own_nbytes(process),
                    "pss": getattr(memory, "pss", memory.rss),
                    "fds": process.num_fds() if hasattr(process, "num_fds") else process.num_handles(),
                    "threads": process.num_threads(),
                }
            except psutil.Error:
                continue
            for figure, value in figures.items():
                self.add(name, figure, value, process.pid)
        self.add("all", "shm", shared_nbytes(self._engine))
        if self._gpu:
            self.add("all", "gpu", sum(gpu_nbytes("memory.used")))

    def add(self, name: str, figure: str, value: float, pid: int = 0) -> None:
        """One value, now."""
        series = self.series[name, figure, pid]
        series.at_s.append(time.monotonic() - self._start_s)
        series.values.append(value)

    def _alive(self) -> dict[str, psutil.Process]:
        try:
            return processes(self._engine)
        except psutil.Error:  # one ended while it was looked at
            return {}


def growing(series: dict[Key, Series]) -> list[str]:
    """The figures that grow, in words."""
    found = []
    for (name, figure, _), one in series.items():
        line = slope(one) if figure in ALLOWED else None
        if line and line.watched_s >= WARM_S / 2 - WARM_MARGIN_S and line.grows(ALLOWED[figure], ALLOWED_MORE[figure]):
            found.append(
                f"{figure} of {name} grew by {line.growth:,.0f} ({line.low:,.0f} to {line.high:,.0f}) "
                f"over {line.watched_s:.0f} s, of {line.mean:,.0f}"
            )
    return found


def shared_nbytes(engine: Engine) -> int:
    """Of the engine's shared memory segments, where the system shows them as files; 0 elsewhere."""
    directory = Path("/dev/shm")
    argv = next((argv for argv in _argvs(engine) if any(flag.startswith("--run-id=") for flag in argv)), [])
    run_id = next((flag.split("=", 1)[1] for flag in argv if flag.startswith("--run-id=")), "")
    if not run_id or not directory.is_dir():
        return 0
    total = 0
    for file in directory.glob(f"*{run_id}*"):
        try:
            total += file.stat().st_size
        except OSError:
            continue
    return total


def _argvs(engine: Engine) -> list[Sequence[str]]:
    found: list[Sequence[str]] = []
    for child in engine.children():
        try:
            found.append(child.cmdline())
        except psutil.Error:
            continue
    return found
