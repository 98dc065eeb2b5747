# mypy: allow-untyped-calls
"""The kernels around the experts, timed on one GPU beside their floors, torch's own and sgl_kernel's.

`python -m tests.bench.bench_small_kernels --out results.md` from the repository's root, on a machine with an H200:
under a minute, kernels compiled on the way included. `--only sample` keeps to the operations whose names begin so;
`--sweep` times candidates of attention's tiles and splits, up to `--limit-s`. Needs torch and triton. A time is that of
a CUDA graph's replay between two events; keys and values come from memory, what a step has just made from L2.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from triton.runtime.errors import OutOfResources, PTXASError

from kernels.attention import attention, decode_attention, store_kv, tri
from kernels.attention.cost import Tile
from kernels.norm import rms_norm
from kernels.rope import norm_rope
from kernels.rope import ref as rope_ref
from kernels.sampling import RowSampling, sample
from kernels.topk_route import topk_route
from tests.bench.bench_kernels import Rates, ceilings
from tests.bench.kernel_steps import SAMPLES, measure
from tests.bench.report import gpu_conditions, table

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, K, VOCAB, PAGE_TOKENS = 2560, 24, 2, 256, 512, 10, 248_320, 16
"""Qwen3.8-Flash-Next, as if all of its attention were full and all of a head rotary."""
TOKENS = (1, 8, 128, 1324)
SEQUENCES = (1, 8)
CONTEXTS = (128, 8192, 32_768)
CHUNKS = ((128, 0), (1324, 0), (4096, 0), (38, 28_000), (201, 28_000), (4096, 61_440))
"""Rows of a prefill chunk, and positions before it."""
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 4.0),
    "temperature 0.7": (0.7, 0, 1.0, 4.0),
    "top_k 20, top_p 0.95": (0.7, 20, 0.95, 4.0),
    "top_k 500": (0.7, 500, 1.0, 4.0),
    "top_p 0.95": (1.0, 0, 0.95, 4.0),
    "top_p 0.95, flat logits": (1.0, 0, 0.95, 0.5),
}
"""temperature, top_k, top_p, and the standard deviation of normal logits."""
BEYOND_L2 = 200 << 20

Actions = Sequence[Callable[[], object]]


class Case(NamedTuple):
    """One line: the same work by us and by others, on several copies in turn; what it must move and multiply."""

    operation: str
    shape: str
    ours: Actions
    nbytes: float
    flops: float = 0
    torch: Actions = ()
    sgl: Actions = ()


def main() -> None:
    """Time, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Markdown file for the results")
    parser.add_argument("--only", default="", help="operations whose names begin so")
    parser.add_argument("--sweep", action="store_true", help="time candidates of attention's tiles and splits")
    parser.add_argument("--limit-s", type=float, default=200, help="the sweep starts nothing after this")
    options = parser.parse_args()
    start = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as file:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        say(f"# Kernels around the experts\n\n{conditions()}\n")
        rates = ceilings()
        say(f"- memory moves {rates.bytes_per_s / 1e12:.2f} TB/s, a product {rates.flops / 1e12:.0f} TFLOP/s\n")
        head = ("operation", "shape", "ours, µs", "floor, µs", "torch, µs", "sgl_kernel, µs")
        rows = [line(case, rates) for case in cases() if case.operation.startswith(options.only)]
        say(f"{table(head, rows)}\n\n[{time.monotonic() - start:.0f} s]")
        for found in sweep(start + options.limit_s) if options.sweep else ():
            say(found)
        say(f"\nThe whole run: {time.monotonic() - start:.0f} s.")


def conditions() -> str:
    """Command, GPU, versions, commit and shapes."""
    return (
        f"{gpu_conditions(torch.cuda.get_device_name())}\n"
        f"- H {HIDDEN}, heads {HEADS}/{KV_HEADS} x {HEAD_DIM}, E {EXPERTS}, K {K}, V {VOCAB}, pages of {PAGE_TOKENS}, "
        f"bfloat16 (logits to draw from: float32); median (min-max) of {SAMPLES}"
    )


def line(case: Case, rates: Rates) -> list[str]:
    """A row of the table."""
    floor = 1e6 * max(case.nbytes / rates.bytes_per_s, case.flops / rates.flops)
    ours = measure(list(case.ours)).microseconds()
    return [case.operation, case.shape, ours, f"{floor:.1f}", others(case.torch), others(case.sgl)]


def others(actions: Actions) -> str:
    """A peer's time; why there is none if it does not run here."""
    try:
        return measure(list(actions)).microseconds() if actions else ""
    except AttributeError:
        return "not in this build"
    except (RuntimeError, TypeError) as error:
        return type(error).__name__


def cases() -> Iterator[Case]:
    """One after the other, for the larger ones take gigabytes."""
    sgl = sgl_kernel()
    for tokens in TOKENS:
        yield norm_case(tokens, sgl)
        yield rope_case(tokens)
        yield store_case(tokens)
        yield route_case(tokens, sgl)
    for sequences, context in itertools.product(SEQUENCES, CONTEXTS):
        yield Context(sequences, context).decode_case()
    for rows, start in CHUNKS:
        yield Context(1, start + rows).prefill_case(rows, start)
    for rows, name in itertools.product(SEQUENCES, SETTINGS):
        yield sample_case(rows, name, sgl)


def sgl_kernel() -> ModuleType | None:
    """None where it is not installed, or built for another torch."""
    try:
        return import_module("sgl_kernel")
    except ImportError:
        return None


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def norm_case(tokens: int, sgl: ModuleType | None) -> Case:
    xs, weight = [random(tokens, HIDDEN) for _ in range(4)], random(HIDDEN)
    return Case(
        "rms_norm",
        f"T {tokens}",
        [partial(rms_norm, x, weight, 1e-6) for x in xs],
        2 * xs[0].nbytes,
        torch=[partial(functional.rms_norm, x, (HIDDEN,), weight, 1e-6) for x in xs],
        sgl=[partial(sgl.rmsnorm, x, weight, 1e-6) for x in xs] if sgl else (),
    )


def rope_case(tokens: int) -> Case:
    """Beside torch's operations one by one."""
    products = [random(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM) for _ in range(4)]
    views = [product.split([HEADS, KV_HEADS, KV_HEADS], dim=1) for product in products]
    weight = random(HEAD_DIM)
    angles = torch.rand(tokens, HEAD_DIM // 2, device="cuda") * 100
    rest = (weight, weight, 1e-6, angles.cos(), angles.sin())
    return Case(
        "norm_rope",
        f"T {tokens}",
        [partial(norm_rope, q, k, *rest) for q, k, _ in views],
        2 * tokens * (HEADS + KV_HEADS) * HEAD_DIM * 2,
        torch=[partial(rope_ref.norm_rope, q, k, *rest) for q, k, _ in views],
    )


def store_case(tokens: int) -> Case:
    kvs = [random(2, tokens, KV_HEADS, HEAD_DIM) for _ in range(4)]
    stored = random(2, 256, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
    places = torch.randperm(256 * PAGE_TOKENS, device="cuda")[:tokens]
    pages, offsets = places // PAGE_TOKENS, places % PAGE_TOKENS

    def by_index(kv: torch.Tensor) -> None:
        stored[0][pages, offsets], stored[1][pages, offsets] = kv[0], kv[1]

    return Case(
        "store_kv",
        f"T {tokens}",
        [partial(store_kv, kv[0], kv[1], stored[0], stored[1], pages, offsets) for kv in kvs],
        2 * kvs[0].nbytes,
        torch=[partial(by_index, kv) for kv in kvs],
    )


def route_case(tokens: int, sgl: ModuleType | None) -> Case:
    logits = [random(tokens, EXPERTS) for _ in range(4)]
    weights = torch.empty(tokens, K, device="cuda")
    experts = torch.empty(tokens, K, dtype=torch.int32, device="cuda")

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        values = torch.topk(torch.softmax(x, dim=1, dtype=torch.float32), K, dim=1).values
        return values / values.sum(dim=1, keepdim=True)

    return Case(
        "topk_route",
        f"T {tokens}",
        [partial(topk_route, x, K, True) for x in logits],
        logits[0].nbytes + 8 * tokens * K,
        torch=[partial(one_by_one, x) for x in logits],
        sgl=[partial(sgl.topk_softmax, weights, experts, x, True) for x in logits] if sgl else (),
    )


class Context:
    """Keys and values of several sequences of one length, in pages that lie mixed, and copies beyond L2."""

    def __init__(self, sequences: int, length: int) -> None:
        count = -(-length // PAGE_TOKENS)
        self.sequences, self.length = sequences, length
        self.nbytes = 2 * sequences * length * KV_HEADS * HEAD_DIM * 2
        shape = (2, sequences * count, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
        self.copies = [random(*shape) for _ in range(min(16, 1 + BEYOND_L2 // self.nbytes))]
        self.table = torch.randperm(sequences * count, device="cuda").view(sequences, count).to(torch.int32)
        self.lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")

    def decode(self, q: torch.Tensor, plan: tuple[Tile, int] | None = None) -> Actions:
        function = partial(tri.decode_attention, plan=plan) if plan else decode_attention
        return [partial(function, q, kv[0], kv[1], self.table, self.lengths, HEAD_DIM**-0.5) for kv in self.copies]

    def prefill(self, q: torch.Tensor, plan: tuple[Tile, int] | None = None) -> Actions:
        function = partial(tri.attention, plan=plan) if plan else attention
        pages, start = self.table[0].long(), self.length - len(q)
        return [partial(function, q, kv[0], kv[1], pages, start, HEAD_DIM**-0.5) for kv in self.copies]

    def in_one_piece(self, q: torch.Tensor) -> Actions:
        """torch's attention, as if keys and values lay in order; `q` is [sequences, HEADS, n, D]."""
        n = q.shape[2]
        how: dict[str, Any] = {"enable_gqa": True}
        if n == self.length:
            how["is_causal"] = True
        elif n > 1:
            how["attn_mask"] = causal_lower_right(n, self.length)
        views = [kv.view(2, self.sequences, -1, KV_HEADS, HEAD_DIM)[:, :, : self.length] for kv in self.copies]
        views = [view.transpose(2, 3) for view in views]
        return [partial(functional.scaled_dot_product_attention, q, kv[0], kv[1], **how) for kv in views]

    def decode_case(self) -> Case:
        q = random(self.sequences, HEADS, HEAD_DIM)
        shape = f"B {self.sequences}, context {self.length}"
        return Case("decode_attention", shape, self.decode(q), self.nbytes, torch=self.in_one_piece(q[:, :, None]))

    def prefill_case(self, rows: int, start: int) -> Case:
        q = random(rows, HEADS, HEAD_DIM)
        pairs = rows * start + rows * (rows + 1) / 2
        return Case(
            "attention",
            f"T {rows} after {start}",
            self.prefill(q),
            self.nbytes + 2 * q.nbytes,
            4 * HEADS * HEAD_DIM * pairs,
            self.in_one_piece(q.transpose(0, 1)[None]),
        )


def sample_case(rows: int, name: str, sgl: ModuleType | None) -> Case:
    """torch takes the argmax, or draws without top_k and top_p; sgl_kernel draws from probabilities made by torch."""
    heat, k, p, spread = SETTINGS[name]
    logits = [torch.randn(rows, VOCAB, device="cuda") * spread for _ in range(4)]

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    settings = RowSampling(
        column(heat, torch.float64),
        column(k, torch.int64),
        column(p, torch.float64),
        column(0.0, torch.float64),
        torch.arange(rows, device="cuda"),
        torch.arange(rows, device="cuda"),
    )

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(torch.softmax(x / heat, dim=1), 1) if heat else x.argmax(dim=1)

    def by_sgl(x: torch.Tensor) -> object:
        assert sgl is not None
        return sgl.top_k_top_p_sampling_from_probs(torch.softmax(x / heat, dim=1), k or VOCAB, p)

    return Case(
        "sample",
        f"B {rows}, {name}",
        [partial(sample, x, settings) for x in logits],
        logits[0].nbytes,
        torch=[partial(by_torch, x) for x in logits] if (k, p) == (0, 1.0) else (),
        sgl=[partial(by_sgl, x) for x in logits] if sgl and heat and (k, p) != (0, 1.0) else (),
    )


def sweep(stop_at: float) -> Iterator[str]:
    """For contexts and chunks of several sizes, the best plans, best first."""
    yield "\n## Sweep: µs of m n chunk stages warps / splits\n"
    for sequences, context in ((1, 1324), (1, 32_768), (8, 8192)):
        there, q = Context(sequences, context), random(sequences, HEADS, HEAD_DIM)
        tiles = [Tile(16, n, 256, stages, warps) for n in (64, 32, 128) for stages in (5, 3, 7) for warps in (4, 8)]
        plans = list(itertools.product(tiles, (64, 32, 128)))
        yield best(f"decode B {sequences}, context {context}", partial(there.decode, q), plans, stop_at)
    for rows, start in ((1324, 0), (38, 28_000), (4096, 28_672)):
        there, q = Context(1, start + rows), random(rows, HEADS, HEAD_DIM)
        tiles = [Tile(m, n, 256, s, w) for m in (128, 64) for n in (64, 32, 128) for s in (3, 2, 4, 5) for w in (8, 4)]
        plans = list(itertools.product(tiles, (1,) if rows > 1000 else (8, 4, 16)))
        yield best(f"prefill T {rows} after {start}", partial(there.prefill, q), plans, stop_at)


def best(
    name: str,
    actions: Callable[[tuple[Tile, int]], Actions],
    plans: Sequence[tuple[Tile, int]],
    stop_at: float,
) -> str:
    found: list[tuple[float, str]] = []
    for tile, splits in plans:
        if time.monotonic() >= stop_at:
            break
        try:
            taken = measure(list(actions((tile, splits))), 7).median
        except (OutOfResources, PTXASError):
            continue
        found.append((1e3 * taken, f"{' '.join(map(str, tile))} / {splits}"))
    listed = ", ".join(f"{plan}: {taken:.1f}" for taken, plan in sorted(found)[:8])
    return f"- {name} ({len(found)} of {len(plans)} plans): {listed or 'out of time'}"


if __name__ == "__main__":
    main()
