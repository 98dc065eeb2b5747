"""Candidates of tiles for the grouped GEMM, timed on one GPU: what kernels/grouped_gemm/cost.py chooses from."""

import time
from collections.abc import Iterator, Sequence
from functools import partial

from triton.runtime.errors import OutOfResources, PTXASError

from kernels.grouped_gemm.cost import Tile
from tests.bench.kernel_steps import FLASH_NEXT, QWEN3, Layer, Step, measure, steps_of

SWEEP_ROWS = {1: (1, 16), 8: (1, 16), 16: (1, 16), 128: (16, 32), 1024: (32, 64), 4096: (64, 128), 512: (16, 32)}
"""block_m for each T, what matters most first; 1 is the kernels of few tokens."""
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
SWEEP_FEW = {
    "nvfp4": (
        (8, 256, 1, 4),
        (8, 256, 2, 4),
        (16, 64, 1, 2),
        (16, 64, 5, 2),
        (16, 128, 1, 4),
        (16, 128, 2, 4),
        (16, 256, 1, 8),
        (16, 256, 2, 8),
        (32, 64, 1, 4),
        (32, 64, 2, 4),
        (32, 64, 5, 4),
        (32, 128, 1, 8),
        (64, 64, 1, 8),
    ),
    "bfloat16": (
        (4, 256, 2, 4),
        (8, 128, 2, 4),
        (8, 128, 4, 4),
        (8, 256, 2, 8),
        (16, 64, 2, 4),
        (16, 64, 4, 4),
        (16, 128, 1, 8),
        (16, 128, 2, 8),
        (16, 128, 4, 8),
        (32, 64, 2, 8),
    ),
}
"""The same for block_m 1, where a thread has 16 bytes of a row of W in each turn."""


def sweep(format_name: str, only: Sequence[int] | None, stop_at: float) -> Iterator[str]:
    """For each T, the best tiles of either kernel, best first; bfloat16 in the geometry of a model that has it."""
    geometry = FLASH_NEXT if format_name == "nvfp4" else QWEN3
    layer = Layer(format_name, geometry)
    yield f"\n## Sweep ({format_name}, {geometry.name}): ms of tiles m n k stages warps\n"
    for tokens, block_ms in SWEEP_ROWS.items():
        if only is not None and tokens not in only:
            continue
        found: dict[str, list[tuple[float, Tile]]] = {"gate-up": [], "down": []}
        for block_m in block_ms:
            steps = steps_of(layer, tokens, block_m)
            for rest in SWEEP_FEW[format_name] if block_m == 1 else SWEEP_REST:
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
