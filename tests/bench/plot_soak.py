"""A plot of each process's private memory over a soak. Needs matplotlib (`pip install -e '.[bench]'`)."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.soak_samples import Key, Series


def plot(series: Mapping[Key, Series], out: Path) -> None:
    """A line for each process, in MB over minutes. ImportError without matplotlib."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for (name, what, _), one in sorted(series.items()):
        if what in ("private", "gpu"):
            label = name if what == "private" else "GPU"
            axes.plot([at / 60 for at in one.at_s], [value / 1e6 for value in one.values], label=label)
    axes.set_yscale("log")
    axes.set_xlabel("minutes")
    axes.set_ylabel("private memory, MB")
    axes.set_title("Memory under mixed load")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(out, dpi=150)
