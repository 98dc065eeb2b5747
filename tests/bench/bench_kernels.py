# mypy: allow-untyped-calls
"""The kernels of one MoE layer on one GPU, all experts resident: checked, then timed beside a peer and the floors.

`python -m tests.bench.bench_kernels --out results.md [--sweep]` from the repository's root, on a machine with an H200:
about a minute and a half, with `--sweep` (candidates of tiles) up to `--limit-s`. Needs torch, triton and msgspec. A
time is that of a CUDA graph's replay between two events, over several routings in turn so that no expert stays in L2.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.formats import layout
from kernels.grouped_gemm import combine, cost, grouped_gemm_slots, tri
from kernels.grouped_gemm.cost import Tile
from kernels.moe_align import Blocks, blocks, max_blocks, moe_align
from tests.bench.report import gpu_conditions, table
from tests.kernels import device_checks

HIDDEN, INTERMEDIATE, EXPERTS, K = 2560, 640, 512, 10
"""Qwen3.8-Flash-Next."""
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)
PEER_MS = {16: 1.9, 64: 4.7, 128: 7.3, 256: 8.1, 512: 8.9, 1024: 10.7, 4096: 35.4}
TARGET_MS = {16: 0.4, 128: 1.2, 1024: 2.0, 4096: 5.0}
SAMPLES = 20

SWEEP_ROWS = {128: (16, 32), 1024: (32, 64), 4096: (64, 128), 16: (16,), 1: (16,), 512: (16, 32)}
"""block_m for each T, what matters most first."""
SWEEP_REST = (
    (32, 64, 4, 4),
    (32, 128, 3, 4),
    (64, 64, 2, 4),
    (64, 64, 3, 4),
    (64, 64, 4, 4),
    (64, 128, 2, 4),
    (64, 128, 3, 4),
    (64, 32, 4, 4),
    (128, 64, 3, 4),
    (128, 64, 3, 8),
    (128, 64, 4, 8),
    (128, 128, 2, 8),
)
"""block_n, block_k, stages, warps."""


class Rates(NamedTuple):
    """What the floors are reckoned with, measured in this run."""

    bytes_per_s: float  # read, or read and written, of a large tensor
    flops: float  # of a large bfloat16 product


class Spread(NamedTuple):
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f}-{self.high:.4f})"


class Layer:
    """A layer's experts in a pool, each in the slot of its number."""

    def __init__(self, format_name: str) -> None:
        self.record = layout(format_name, HIDDEN, INTERMEDIATE)
        self.pool = device_checks.random_records(self.record, EXPERTS, 1)
        self.slot_of = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
        self.span = torch.tensor([0, EXPERTS], dtype=torch.int32, device="cuda")


class Step:
    """T tokens routed uniformly, and what each kernel needs of them."""

    def __init__(self, layer: Layer, tokens: int, seed: int, block_m: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layer, self.tokens = layer, tokens
        self.x = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16).cuda()
        self.weights, self.chosen = device_checks.routing(tokens, EXPERTS, K, generator)
        self.tiles = cost.tiles(tokens, K, EXPERTS, layer.record.format)
        self.block_m = block_m or self.tiles.gate_up.block_m
        self.blocks = self.align()
        self.left = self.even_first()
        self.mid = torch.randn(tokens * K, INTERMEDIATE, generator=generator).to(torch.bfloat16).cuda()
        self.rows = torch.randn(tokens * K, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.grid_blocks = max_blocks(tokens * K, EXPERTS, self.block_m)

    def align(self) -> Blocks:
        return blocks(moe_align(self.chosen, EXPERTS), self.block_m)

    def even_first(self) -> torch.Tensor:
        return tri.even_first(self.x) if self.layer.record.format == "nvfp4" else self.x

    def gate_up(self, tile: Tile) -> None:
        part = self.layer
        args = (self.blocks, self.grid_blocks, part.span, part.slot_of, part.pool, part.record, K, tile)
        tri.gate_up(self.left, *args, self.mid)

    def down(self, tile: Tile) -> None:
        part = self.layer
        args = (self.blocks, self.grid_blocks, part.span, part.slot_of, part.pool, part.record, tile)
        tri.down(self.mid, self.weights, *args, self.rows)

    def total(self) -> torch.Tensor:
        part, table_ = self.layer, self.align()
        grouped_gemm_slots(
            self.x, self.weights, table_, part.pool, part.record, part.slot_of, part.span, EXPERTS, self.rows
        )
        return combine(self.rows, self.tokens)


def main() -> None:
    """Check, time, and write what came out, also if the sweep does not come to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Markdown file for the results")
    parser.add_argument("--sweep", action="store_true", help="time candidates of tiles for nvfp4 and print the best")
    parser.add_argument("--limit-s", type=float, default=220, help="the sweep starts nothing after this")
    options = parser.parse_args()
    start = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as file:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        say(f"# Kernels of one MoE layer\n\n{conditions()}\n")
        for line in check():
            say(f"- {line} [{time.monotonic() - start:.0f} s]")
        rates = ceilings()
        say(f"- memory moves {rates.bytes_per_s / 1e12:.2f} TB/s, a product {rates.flops / 1e12:.0f} TFLOP/s")
        for format_name in ("nvfp4", "bfloat16"):
            say(f"\n## {format_name}\n\n{timings(format_name, rates)}\n\n[{time.monotonic() - start:.0f} s]")
        if options.sweep:
            for line in sweep(start + options.limit_s):
                say(line)
        say(f"\nThe whole run: {time.monotonic() - start:.0f} s.")


def conditions() -> str:
    """Command, GPU, versions, commit and shapes."""
    return (
        f"{gpu_conditions(torch.cuda.get_device_name())}\n"
        f"- H {HIDDEN}, I {INTERMEDIATE}, E {EXPERTS}, K {K}, all resident, uniform routing; "
        f"ms: median (min-max) of {SAMPLES}"
    )


def check() -> Iterator[str]:
    """Raises AssertionError at the first thing that is wrong."""
    for num_experts, tokens in itertools.product(device_checks.EXPERT_COUNTS, (0, 1, 102, 103, 129, 1025, 4096)):
        device_checks.alignment(num_experts, tokens, K)
    yield f"alignment equals the reference's at {device_checks.EXPERT_COUNTS} experts"
    for tokens in (1, 129):
        device_checks.sums(tokens, K, HIDDEN)
    yield "the sum equals the reference's"
    for format_name in ("float32", "bfloat16", "nvfp4"):
        cases = ((1, 512, 160), (16, 512, 160), (37, 96, 48), (300, 512, 320), (2000, 80, 48))
        errors = [device_checks.values(format_name, *case, 16, 4) for case in cases]
        yield f"{format_name}: relative errors against float64 {', '.join(f'{error:.1e}' for error in errors)}"
    error = device_checks.values("nvfp4", 24, HIDDEN, INTERMEDIATE, 12, K)
    yield f"nvfp4 in full size: relative error {error:.1e}"
    for format_name in ("bfloat16", "nvfp4"):
        device_checks.bits(format_name, 600, 8, 2, HIDDEN, INTERMEDIATE)
        for tokens in (1, 16, 128, 1024):
            device_checks.bits(format_name, tokens, 200, K, HIDDEN, INTERMEDIATE)
        yield f"{format_name}: equal bits in queries, in other slots, beside not-a-number"


def ceilings() -> Rates:
    """Reading 2 GiB once, by a sum or by a copy, whichever moves more bytes, and a product of 8192^3."""
    source = torch.randint(0, 256, (2 << 28, 1), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    nbytes = source.nbytes
    read = nbytes / measure([lambda: source.amax()]).median
    copied = 2 * nbytes / measure([lambda: torch.add(source, 1, out=target)]).median
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    multiplied = measure([lambda: left @ right]).median
    return Rates(max(read, copied) * 1e3, 2 * 8192**3 / multiplied * 1e3)


def timings(format_name: str, rates: Rates) -> str:
    """A table with a row for each number of tokens."""
    layer = Layer(format_name)
    rows: list[list[str]] = []
    for tokens in TOKENS:
        steps = steps_of(layer, tokens)
        tiles = steps[0].tiles
        parts = [
            measure([step.align for step in steps]),
            measure([step.even_first for step in steps]),
            measure([partial(step.gate_up, tiles.gate_up) for step in steps]),
            measure([partial(step.down, tiles.down) for step in steps]),
            measure([partial(combine, step.rows, tokens) for step in steps]),
            measure([step.total for step in steps]),
        ]
        notes = [f"{floor_ms(steps[0], rates):.3f}", str(TARGET_MS.get(tokens, "")), str(PEER_MS.get(tokens, ""))]
        names = [" ".join(str(value) for value in tile) for tile in tiles]
        rows.append([str(tokens), *(str(part) for part in parts), *notes, *names])
    head = ("T", "align", "even first", "gate-up", "down", "combine", "total", "floor", "target", "peer")
    return table((*head, "tile of gate-up (m n k stages warps)", "tile of down"), rows)


def steps_of(layer: Layer, tokens: int, block_m: int | None = None) -> list[Step]:
    """Several routings while one leaves most experts out, or an expert would stay in L2 between two replays."""
    return [Step(layer, tokens, seed, block_m) for seed in range(16 if tokens <= 16 else 2)]


def floor_ms(step: Step, rates: Rates) -> float:
    """Distinct experts read once from memory, or the products of all routes, whichever takes longer."""
    distinct = int(step.chosen.unique().numel())
    read = distinct * step.layer.record.record_nbytes / rates.bytes_per_s
    products = step.tokens * K * 3 * HIDDEN * INTERMEDIATE * 2 / rates.flops
    return 1e3 * max(read, products)


def measure(actions: list[Callable[[], object]], samples: int = SAMPLES) -> Spread:
    """ms of one action: each sample replays a graph of all of them, one after the other."""
    for action in actions:
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for action in actions:
            action()
    for _ in range(3):
        graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) / len(actions) for begin, end in marks]
    return Spread(statistics.median(times), min(times), max(times))


def sweep(stop_at: float) -> Iterator[str]:
    """nvfp4: for each T, the best tiles of either kernel, best first."""
    layer = Layer("nvfp4")
    yield "\n## Sweep (nvfp4): ms of tiles m n k stages warps\n"
    for tokens, block_ms in SWEEP_ROWS.items():
        found: dict[str, list[tuple[float, Tile]]] = {"gate-up": [], "down": []}
        for block_m in block_ms:
            steps = steps_of(layer, tokens, block_m)
            for rest in SWEEP_REST:
                tile = Tile(block_m, *rest)
                for name, times in found.items():
                    if time.monotonic() < stop_at and (taken := candidate(steps, name, tile)) is not None:
                        times.append((taken, tile))
        for name, times in found.items():
            best = ", ".join(f"{' '.join(map(str, tile))}: {taken:.4f}" for taken, tile in sorted(times)[:6])
            yield f"- T {tokens}, {name}: {best or 'out of time'}"


def candidate(steps: list[Step], name: str, tile: Tile) -> float | None:
    """Median ms, or None if the tile does not fit the GPU."""
    run = Step.gate_up if name == "gate-up" else Step.down
    try:
        return measure([partial(run, step, tile) for step in steps], 7).median
    except (OutOfResources, PTXASError):
        return None


if __name__ == "__main__":
    main()
