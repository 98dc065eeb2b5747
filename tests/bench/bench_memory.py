"""What is planned for a GPU beside what is allocated there, part by part, once the largest steps have run.

`python -m tests.bench.bench_memory [--layers 4] [--out memory.md] [-- FLAGS of launch.py]` from the repository's root,
on a machine with a GPU: about a minute a case. Without FLAGS it goes through CASES with a model of made-up weights in
Qwen3.8-Flash-Next's geometry; with them it looks at that start alone. The workspace is what torch holds beyond weights
and KV (copyengine/workspace.py says why that is more than what is alive); the rest is what the plan leaves free, for
two contexts, libraries, kernels and graphs: GPU_RESERVE_NBYTES and GPU_CONTEXTS_NBYTES of copyengine/budget.py are to
cover it.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.flash_next import write_flash_next
from tests.bench.report import gpu_conditions, gpu_name, table
from tests.worker.allocated_memory import Allocated, Size, allocated

CASES: tuple[tuple[str, ...], ...] = (
    ("--slots", "2048"),
    ("--slots", "2048", "--chunked-prefill-size", "512"),
    ("--slots", "2048", "--chunked-prefill-size", "16384"),
    ("--slots", "2048", "--max-running-requests", "64"),
    ("--slots", "2048", "--kv-placement", "host", "--token-embedding-placement", "host"),
    (),
)
HEAD = ("part", "planned, MB", "allocated, MB", "allocated / planned")


def main(argv: Sequence[str]) -> int:
    """Measure, print the tables, write the file."""
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--out", type=Path, help="Markdown file for the results")
    options = parser.parse_args(own)
    texts = ["# Memory of a GPU, planned and allocated", gpu_conditions(gpu_name())]
    with tempfile.TemporaryDirectory() as directory:
        write_flash_next(Path(directory), layers=options.layers)
        synthetic = ("--model", directory, "--load-format", "dummy")
        for case in (tuple(flags),) if flags else CASES:
            seen = allocated(("--device", "cuda", "--port", "0", *(() if flags else synthetic), *case))
            texts.append(section(case, seen))
            print(texts[-1], flush=True)
            if options.out:
                options.out.write_text("\n\n".join(texts) + "\n", "utf-8")
    return 0


def section(case: Sequence[str], seen: Allocated) -> str:
    """One start's table."""
    title = f"## {' '.join(case) or 'all automatic'}\n\n{seen.device}, {seen.free_nbytes / 1e6:,.0f} MB free before"
    return f"{title}\n\n{table(HEAD, [row(size) for size in (*seen.parts, seen.total, seen.rest)])}"


def row(size: Size) -> tuple[str, ...]:
    """One line of it."""
    share = f"{size.allocated_nbytes / size.planned_nbytes:.3f}" if size.planned_nbytes else "-"
    return size.name, f"{size.planned_nbytes / 1e6:,.1f}", f"{size.allocated_nbytes / 1e6:,.1f}", share


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
