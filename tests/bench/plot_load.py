"""A plot of time to first token over the number of clients. Needs matplotlib (`pip install -e '.[bench]'`)."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.offered_load import Served, percentiles


def plot(served: Sequence[Served], title: str, out: Path) -> None:
    """p50 and p99 of each load. ImportError without matplotlib."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    clients = [each.load.clients for each in served]
    for label, values in zip(("p50", "p99"), zip(*(percentiles(s.ttft_s) for s in served), strict=True), strict=True):
        axes.plot(clients, values, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(clients, [str(count) for count in clients])
    axes.set_xlabel("clients")
    axes.set_ylabel("time to first token, s")
    axes.set_title(title)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(out, dpi=150)
