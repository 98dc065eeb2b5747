"""What a fixed order of sums (--deterministic) costs one layer: a decode step and a prefill chunk with and without it.

`python -m tests.bench.bench_deterministic --out results.md` from the repository's root, on a machine with an H200:
about a minute, kernels compiled on the way included; `--device cpu` takes a smaller layer and no GPU. One pre-norm
layer (attention, router, experts that are all in slots) in Qwen3-30B-A3B's geometry, in bfloat16, with its final norm
and without a head. A time on a GPU is that of a CUDA graph's replay.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from copyengine.model_spec import GqaSpec, LayerSpec, ModelSpec, MoeSpec, RopeSpec
from kernels.formats import layout
from tests.bench.kernel_steps import measure
from tests.bench.report import conditions, gpu_conditions, table
from tests.worker.random_weights import random_weights
from tests.worker.resident_experts import ResidentExperts
from worker.host_experts import HostExperts
from worker.kv import KvCache
from worker.layer_rows import LayerRows
from worker.model import build_model
from worker.model.batch import Batch, PageTable, Span
from worker.model.moe import Experts
from worker.model.operations import operations
from worker.model.stack import Decoder

PAGE_TOKENS, VOCAB = 16, 512
SAMPLES = 7
"""Of the host's, whose median is told."""


class Geometry(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    k: int
    intermediate: int
    pages: int
    decode: tuple[tuple[int, int], ...]  # sequences, and positions of each
    prefill: tuple[tuple[int, int], ...]  # rows, and positions before them


GPU = Geometry(
    2048,
    32,
    4,
    128,
    128,
    8,
    768,
    5000,
    ((1, 512), (1, 8192), (8, 2048), (32, 2048)),
    ((128, 0), (2048, 0), (2048, 8192)),
)
HOST = Geometry(1024, 16, 4, 64, 32, 4, 384, 600, ((1, 64), (1, 2048), (8, 512)), ((64, 0), (512, 0), (512, 2048)))


class DeviceExperts:
    """All experts of one layer on the device; see worker.model.moe.Experts."""

    def __init__(self, geometry: Geometry, fixed: bool) -> None:
        self._record = layout("bfloat16", geometry.hidden, geometry.intermediate)
        values = torch.empty(geometry.experts, self._record.record_nbytes // 2, dtype=torch.bfloat16, device="cuda")
        self._pool = values.normal_(0, 0.02).view(torch.uint8)
        self._slot_of = torch.arange(geometry.experts, dtype=torch.int32, device="cuda")
        self._span = torch.tensor([0, geometry.experts], dtype=torch.int32, device="cuda")
        self._experts, self._fixed = geometry.experts, fixed

    def __call__(self, layer: int, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        rows = LayerRows(self._record, self._experts, x, weights, experts, None, self._fixed)
        rows.compute(self._pool, self._slot_of, self._span, self._experts)
        return rows.combined()


def host_experts(geometry: Geometry, fixed: bool) -> Experts:
    record = layout("bfloat16", geometry.hidden, geometry.intermediate)
    values = torch.empty(geometry.experts, record.record_nbytes // 2, dtype=torch.bfloat16).normal_(0, 0.02)
    kind = torch.bfloat16 if fixed else None
    source = ResidentExperts(1, geometry.experts)
    return HostExperts(source, values.view(torch.uint8), record, geometry.experts, fixed_order_of=kind)


class Layer:
    """One layer of one kind of operations."""

    def __init__(self, geometry: Geometry, device: torch.device, deterministic: bool) -> None:
        attention = GqaSpec(geometry.heads, geometry.kv_heads, geometry.head_dim, False, True, RopeSpec(1e6))
        moe = MoeSpec(geometry.experts, geometry.k, geometry.intermediate, True)
        layers = (LayerSpec(attention, moe),)
        spec = ModelSpec("Qwen3MoeForCausalLM", VOCAB, geometry.hidden, 1e-6, 1 << 17, True, "bfloat16", layers)
        self._kv = KvCache(spec, geometry.pages, PAGE_TOKENS, torch.bfloat16, device)
        weights = {name: (w / 10).to(torch.bfloat16).to(device) for name, w in random_weights(spec).items()}
        make = DeviceExperts if device.type == "cuda" else host_experts
        experts = make(geometry, deterministic)
        self.model: Decoder = build_model(spec, weights, self._kv, experts, None, operations(deterministic))
        self._device = device

    def decode(self, sequences: int, length: int) -> Callable[[], object]:
        """A step of sequences that all lie in the same pages but for their last one."""
        positions = np.full(sequences, length - 1)
        count = -(-length // PAGE_TOKENS)
        pages = np.tile(np.arange(count), (sequences, 1))
        pages[:, -1] = count + np.arange(sequences)
        batch = self._batch(positions, pages[:, -1])
        if self._device.type == "cuda":
            lengths = torch.full((sequences,), length, dtype=torch.int32, device=self._device)
            table_ = PageTable(torch.tensor(pages, dtype=torch.int32, device=self._device), lengths)
            return self._step(batch, (), table_)
        spans = tuple(Span(i, 1, length - 1, torch.tensor(pages[i])) for i in range(sequences))
        return self._step(batch, spans, None)

    def prefill(self, rows: int, start: int) -> Callable[[], object]:
        positions = np.arange(start, start + rows)
        pages = torch.arange(-(-(start + rows) // PAGE_TOKENS), device=self._device)
        return self._step(self._batch(positions, positions // PAGE_TOKENS), (Span(0, rows, start, pages),), None)

    def _batch(self, positions: np.ndarray, pages: np.ndarray) -> tuple[torch.Tensor, ...]:
        generator = np.random.default_rng(1)
        arrays = (generator.integers(0, VOCAB, len(positions)), positions, pages, positions % PAGE_TOKENS)
        return tuple(torch.tensor(array, dtype=torch.int64, device=self._device) for array in arrays)

    def _step(
        self, tensors: tuple[torch.Tensor, ...], spans: tuple[Span, ...], page_table: PageTable | None
    ) -> Callable[[], object]:
        tokens, positions, pages, offsets = tensors
        return lambda: self.model.hidden(Batch(tokens, positions, pages, offsets, spans, page_table))


def on_host(step: Callable[[], object]) -> float:
    """Median ms."""
    step()
    times = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


@torch.inference_mode()
def main() -> None:
    """Time, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file for the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=1, help="that compute, on the host")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    geometry = GPU if device.type == "cuda" else HOST
    timed = (lambda step: measure([step]).median) if device.type == "cuda" else on_host
    layers = [Layer(geometry, device, deterministic) for deterministic in (False, True)]
    rows = []
    for sequences, length in geometry.decode:
        rows.append(
            [f"decode {sequences} of {length}", *both([layer.decode(sequences, length) for layer in layers], timed)]
        )
    for count, start in geometry.prefill:
        rows.append([f"prefill {count} after {start}", *both([layer.prefill(count, start) for layer in layers], timed)])
    where = gpu_conditions(torch.cuda.get_device_name()) if device.type == "cuda" else conditions()
    head = ("step", "fastest, ms", "fixed order of sums, ms", "ratio")
    text = f"# A layer with a fixed order of sums\n\n{where}\n- {geometry}\n\n{table(head, rows)}"
    print(text, flush=True)
    if options.out:
        options.out.write_text(text + "\n", "utf-8")


def both(steps: list[Callable[[], object]], timed: Callable[[Callable[[], object]], float]) -> list[str]:
    """ms of both kinds, and how many times as long the second takes."""
    plain, fixed = (timed(step) for step in steps)
    return [f"{plain:.3f}", f"{fixed:.3f}", f"{fixed / plain:.2f}"]


if __name__ == "__main__":
    main()
