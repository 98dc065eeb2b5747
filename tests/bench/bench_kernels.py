# mypy: allow-untyped-calls
"""The kernels of one MoE layer on one GPU, all experts resident: checked, then timed beside a peer and the floors.

`python -m tests.bench.bench_kernels --out results.md` from the repository's root, on a machine with an H200: some three
minutes, two of them checks (`--no-checks` leaves them out). `--sweep nvfp4 bfloat16` times candidates of tiles, up to
`--limit-s`; `--more gpt-oss w4a4` times these kinds of experts instead; `--tokens 1 4 8` keeps to these numbers of
tokens. Needs torch, triton, numpy and msgspec. A time is that of a CUDA graph's replay between two events, over several
routings in turn so that no expert stays in L2.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.formats import ExpertFormat
from kernels.grouped_gemm import combine
from kernels.moe_align import align_in_blocks, moe_align, sgl
from tests.bench.kernel_steps import (
    FLASH_NEXT,
    GPT_OSS,
    QWEN3,
    SAMPLES,
    SLOTS,
    Geometry,
    Layer,
    Step,
    measure,
    steps_of,
)
from tests.bench.kernel_sweep import SWEEP_FEW, sweep
from tests.bench.report import gpu_conditions, table
from tests.kernels import device_checks
from tests.kernels.expert_records import KINDS

CASES = (("nvfp4", FLASH_NEXT), ("bfloat16", FLASH_NEXT), ("bfloat16", QWEN3))
MORE_CASES = {
    "gpt-oss": (ExpertFormat("mxfp4", bias=True, swiglu_limit=7.0), GPT_OSS),
    "w4a4": (ExpertFormat("nvfp4", quantised_inputs=True), FLASH_NEXT),
    "fp8_block": (ExpertFormat("fp8_block", block=(128, 128)), QWEN3),
    "fp8_tensor": (ExpertFormat("fp8_tensor"), QWEN3),
}
TOKENS = (1, 4, 8, 16, 64, 128, 256, 512, 1024, 4096)
DECODE_TOKENS = (1, 4, 8)
PEER_MS = {16: 1.9, 64: 4.7, 128: 7.3, 256: 8.1, 512: 8.9, 1024: 10.7, 4096: 35.4}
TARGET_MS = {16: 0.4, 128: 1.2, 1024: 2.0, 4096: 5.0}
"""Of nvfp4 in Flash-Next's geometry."""


Case = tuple[str, ExpertFormat | str, Geometry]
"""Its title, the experts, their sizes."""


class Rates(NamedTuple):
    """What the floors are reckoned with, measured in this run."""

    bytes_per_s: float  # read, or read and written, of a large tensor
    flops: float  # of a large bfloat16 product


def main() -> None:
    """Check, time, and write what came out, also if the sweep does not come to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Markdown file for the results")
    parser.add_argument("--no-checks", action="store_true", help="only time")
    parser.add_argument("--tokens", type=int, nargs="+", help="only these numbers of tokens")
    parser.add_argument("--sweep", nargs="+", choices=list(SWEEP_FEW), default=[], help="time candidates of tiles")
    parser.add_argument("--more", nargs="+", choices=list(MORE_CASES), default=[], help="only these kinds of experts")
    parser.add_argument("--limit-s", type=float, default=220, help="the sweep starts nothing after this")
    options = parser.parse_args()
    start = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as file:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        say(f"# Kernels of one MoE layer\n\n{conditions()}\n")
        for line in () if options.no_checks else check():
            say(f"- {line} [{time.monotonic() - start:.0f} s]")
        rates = ceilings()
        say(f"- memory moves {rates.bytes_per_s / 1e12:.2f} TB/s, a product {rates.flops / 1e12:.0f} TFLOP/s")
        cases: list[Case] = [(name, *MORE_CASES[name]) for name in options.more]
        cases = cases or [(name, name, geometry) for name, geometry in CASES]
        for section in sections(cases, options.tokens, rates):
            say(f"\n{section}\n\n[{time.monotonic() - start:.0f} s]")
        for format_name in options.sweep:
            for line in sweep(format_name, options.tokens, start + options.limit_s):
                say(line)
        say(f"\nThe whole run: {time.monotonic() - start:.0f} s.")


def sections(cases: Sequence[Case], only: Sequence[int] | None, rates: Rates) -> Iterator[str]:
    """Titles and tables."""
    for name, kind, geometry in cases:
        layer = Layer(kind, geometry)
        title = f"{name}, {geometry.name}"
        few = [tokens for tokens in DECODE_TOKENS if tokens in (only or TOKENS)]
        if few:
            yield f"## {title}: a decode step's layer, µs, {SLOTS:,} slots\n\n{decode_timings(layer, few)}"
        yield f"## {title}: ms\n\n{timings(layer, [t for t in TOKENS if t in (only or TOKENS)], rates)}"
    if sgl_can_be_used():
        yield f"## moe_align: ours and sgl_kernel's, µs, E {FLASH_NEXT.experts}, K {FLASH_NEXT.k}\n\n{alignments(only)}"


def sgl_can_be_used() -> bool:
    """Whether sgl_kernel is there and loads with this torch."""
    try:
        sgl.by_expert(torch.zeros(1, 1, dtype=torch.int32, device="cuda"), 1)
    except ValueError:
        return False
    return True


def conditions() -> str:
    """Command, GPU, versions, commit and shapes."""
    shapes = "; ".join(
        f"{g.name}: H {g.hidden}, I {g.intermediate}, E {g.experts}, K {g.k}" for g in (FLASH_NEXT, QWEN3)
    )
    return (
        f"{gpu_conditions(torch.cuda.get_device_name())}\n"
        f"- {shapes}; all resident, uniform routing; median (min-max) of {SAMPLES}"
    )


def check() -> Iterator[str]:
    """Raises AssertionError at the first thing that is wrong."""
    shape = FLASH_NEXT
    for num_experts, tokens in itertools.product(device_checks.EXPERT_COUNTS, (0, 1, 6, 7, 102, 103, 129, 1025, 4096)):
        device_checks.alignment(num_experts, tokens, FLASH_NEXT.k)
    yield f"alignment equals the reference's at {device_checks.EXPERT_COUNTS} experts"
    for tokens in (1, 129):
        device_checks.sums(tokens, shape.k, shape.hidden)
    yield "the sum equals the reference's"
    for format_name in ("float32", "bfloat16", *KINDS):
        cases = ((1, 512, 160), (16, 512, 160), (37, 96, 64), (300, 512, 320), (900, 96, 64))
        errors = [device_checks.values(format_name, *case, 16, 4) for case in cases]
        yield f"{format_name}: relative errors against float64 {', '.join(f'{error:.1e}' for error in errors)}"
    error = device_checks.values("nvfp4", 24, shape.hidden, shape.intermediate, 12, shape.k)
    few = device_checks.values("nvfp4", 1, shape.hidden, shape.intermediate, 12, shape.k)
    yield f"nvfp4 in full size: relative errors {error:.1e}, {few:.1e} row by row"
    for format_name in ("bfloat16", "nvfp4"):
        device_checks.bits(format_name, 600, 8, 2, shape.hidden, shape.intermediate)
        for tokens in (1, 16, 128, 1024):
            device_checks.bits(format_name, tokens, 200, shape.k, shape.hidden, shape.intermediate)
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


def decode_timings(layer: Layer, all_tokens: Sequence[int]) -> str:
    """A table with a row for each number of tokens: every launch by itself, and all of them as one graph."""
    rows: list[list[str]] = []
    for tokens in all_tokens:
        steps = steps_of(layer, tokens)
        tiles = steps[0].tiles
        parts = [
            measure([step.align for step in steps]),
            measure([partial(layer.admit, step.alignment.offsets) for step in steps]),
            measure([layer.wait for _ in steps]),
            measure([partial(step.gate_up, tiles.gate_up) for step in steps]),
            measure([partial(step.down, tiles.down) for step in steps]),
            measure([partial(combine, step.rows, tokens) for step in steps]),
        ]
        together = f"{1e3 * sum(part.median for part in parts):.1f}"
        whole = measure([step.decode for step in steps])
        rows.append([str(tokens), *(part.microseconds() for part in parts), together, whole.microseconds()])
    head = ("T", "align", "admit", "wait (kernel)", "gate-up", "down", "combine", "their sum", "one graph")
    return table(head, rows)


def timings(layer: Layer, all_tokens: Sequence[int], rates: Rates) -> str:
    """A table with a row for each number of tokens."""
    rows: list[list[str]] = []
    noted = (layer.record.kind, layer.geometry) == (ExpertFormat("nvfp4"), FLASH_NEXT)
    for tokens in all_tokens:
        steps = steps_of(layer, tokens)
        tiles = steps[0].tiles
        parts = [
            measure([step.align for step in steps]),
            measure([step.arrange for step in steps]) if steps[0].arrange() is not steps[0].x else "",
            measure([partial(step.gate_up, tiles.gate_up) for step in steps]),
            measure([partial(step.down, tiles.down) for step in steps]),
            measure([partial(combine, step.rows, tokens) for step in steps]),
            measure([step.total for step in steps]),
        ]
        notes = [str(values.get(tokens, "")) if noted else "" for values in (TARGET_MS, PEER_MS)]
        names = [" ".join(str(value) for value in tile) for tile in tiles]
        floor = f"{floor_ms(steps[0], rates):.3f}"
        rows.append([str(tokens), *(str(part) for part in parts), floor, *notes, *names])
    head = ("T", "align", "arrange", "gate-up", "down", "combine", "total", "floor", "target", "peer")
    return table((*head, "tile of gate-up (m n k stages warps)", "tile of down"), rows)


def alignments(only: Sequence[int] | None) -> str:
    """Ours with and without the table of blocks; sgl_kernel's routes as they come, and put in order."""
    rows: list[list[str]] = []
    experts = FLASH_NEXT.experts
    for tokens in (t for t in TOKENS if t in (only or TOKENS)):
        chosen = [
            device_checks.routing(tokens, experts, FLASH_NEXT.k, torch.Generator().manual_seed(i))[1] for i in range(8)
        ]
        ways: list[Callable[[torch.Tensor], object]] = [
            lambda routing: align_in_blocks(routing, experts, 16),
            lambda routing: moe_align(routing, experts),
            lambda routing: sgl.by_expert(routing, experts),
            lambda routing: moe_align(routing, experts, "sgl_kernel"),
        ]
        times = [measure([partial(way, routing) for routing in chosen]).microseconds() for way in ways]
        rows.append([str(tokens), *times])
    return table(("T", "ours, blocks too", "ours", "sgl_kernel, in no order", "sgl_kernel, in order"), rows)


def floor_ms(step: Step, rates: Rates) -> float:
    """Distinct experts read once from memory, or the products of all routes, whichever takes longer."""
    distinct = int(step.chosen.unique().numel())
    read = distinct * step.layer.record.record_nbytes / rates.bytes_per_s
    products = step.tokens * step.k * 3 * step.layer.record.hidden * step.layer.record.intermediate * 2 / rates.flops
    return 1e3 * max(read, products)


if __name__ == "__main__":
    main()
