"""A plot of what bench_ttft found: `python -m tests.bench.plot_ttft results.jsonl out.png`, on any machine.

Needs matplotlib (`pip install -e '.[bench]'`) and msgspec.
"""

import argparse
import importlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.ttft_arms import (
    PUBLISHED_DEMAND_S,
    PUBLISHED_STREAMED_S,
    PUBLISHED_TOKENS,
    Arm,
    lengths,
    name,
    of_length,
    read,
)


def plot(arms: Sequence[Arm], out: Path) -> None:
    """TTFT over the prompt's length, a line for each arm, with the published ones. ImportError without matplotlib."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for arm in arms:
        _line(axes, arm)
    axes.plot(PUBLISHED_TOKENS, PUBLISHED_STREAMED_S, "s:", color="0.6", label="RTX 3090 Ti, streamed (published)")
    axes.plot(PUBLISHED_TOKENS, PUBLISHED_DEMAND_S, "o--", color="0.6", label="RTX 3090 Ti, on demand (published)")
    axes.set_xscale("log")
    ticks = lengths(arms) or list(PUBLISHED_TOKENS)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token, s")
    axes.set_title(f"{arms[0].model}, {arms[0].slots} slots, {arms[0].device}" if arms else "published")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=150)


def _line(axes: Any, arm: Arm) -> None:
    xs = lengths([arm])
    spread = [sorted(prompt.ttft_s for prompt in of_length(arm, tokens)) for tokens in xs]
    ys = [statistics.median(times) for times in spread]
    bars = [[y - times[0] for y, times in zip(ys, spread, strict=True)]]
    bars += [[times[-1] - y for y, times in zip(ys, spread, strict=True)]]
    axes.errorbar(xs, ys, bars, marker="o", capsize=3, label=name(arm))


def main(argv: Sequence[str]) -> int:
    """Plot one file into another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON lines of bench_ttft")
    parser.add_argument("out", type=Path, help="PNG, or what else matplotlib writes by its ending")
    stated = parser.parse_args(argv)
    plot(read(stated.results), stated.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
