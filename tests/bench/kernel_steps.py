# mypy: allow-untyped-calls
"""One MoE layer's kernels on one GPU, ready to be timed: its experts, steps of T tokens through it, and the clock."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels import admit
from kernels.flag_wait import spin_until_set
from kernels.formats import ExpertFormat, layout
from kernels.grouped_gemm import InputScales, arrange, combine, grouped_gemm_slots, tri, tri_few, variant
from kernels.grouped_gemm.cost import Tile
from kernels.grouped_gemm.ref import NO_SCALES
from kernels.moe_align import Alignment, Blocks, align_in_blocks, max_blocks
from tests.kernels import device_checks
from tests.kernels.admit_histories import Pair, Size


class Geometry(NamedTuple):
    name: str
    hidden: int
    intermediate: int
    experts: int
    k: int


FLASH_NEXT = Geometry("Qwen3.8-Flash-Next", 2560, 640, 512, 10)
QWEN3 = Geometry("Qwen3-30B-A3B", 2048, 768, 128, 8)
GPT_OSS = Geometry("gpt-oss-20b", 2880, 2880, 32, 4)
SLOTS = 2100
SAMPLES = 20


class Spread(NamedTuple):
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f}-{self.high:.4f})"

    def microseconds(self) -> str:
        return f"{1e3 * self.median:.1f} ({1e3 * self.low:.1f}-{1e3 * self.high:.1f})"


class Layer:
    """A layer's experts in a pool, each in the slot of its number, and a ring that nothing is written to."""

    def __init__(self, kind: ExpertFormat | str, geometry: Geometry) -> None:
        self.geometry = geometry
        self.record = layout(kind, geometry.hidden, geometry.intermediate)
        self.scales = InputScales(0.002, 0.0005) if self.record.kind.quantised_inputs else None
        self.pool = device_checks.random_records(self.record, geometry.experts, 1)
        self.slot_of = torch.arange(geometry.experts, dtype=torch.int32, device="cuda")
        self.span = torch.tensor([0, geometry.experts], dtype=torch.int32, device="cuda")
        self.admission = Pair(Size(1, geometry.experts, SLOTS, 128, 64), "cuda")
        state = self.admission.state
        state.slot_of[0] = state.owner[: geometry.experts] = self.slot_of
        state.last_used[: geometry.experts] = 0

    def admit(self, offsets: torch.Tensor) -> None:
        admit.admit_layer(self.admission.state, self.admission.device, 0, offsets, count_routing=True)

    def wait(self) -> None:
        """By the spinning kernel; a stream wait is no kernel."""
        spin_until_set(self.admission.flags, 0)


class Step:
    """T tokens routed uniformly, and what each kernel needs of them."""

    def __init__(self, layer: Layer, tokens: int, seed: int, block_m: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = layer.geometry
        self.layer, self.tokens, self.k = layer, tokens, shape.k
        self.x = torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16).cuda()
        self.weights, self.chosen = device_checks.routing(tokens, shape.experts, shape.k, generator)
        self.tiles = variant(tokens, shape.k, shape.experts, layer.record, self.x.device)
        self.block_m = block_m or self.tiles.gate_up.block_m
        self.alignment, self.blocks = self.align()
        self.left = tri.even_first(self.x) if layer.record.format in ("nvfp4", "mxfp4") else self.x
        self.mid = torch.randn(tokens * shape.k, shape.intermediate, generator=generator).to(torch.bfloat16).cuda()
        self.rows = torch.randn(tokens * shape.k, shape.hidden, dtype=torch.bfloat16, device="cuda")
        self.most = min(shape.experts, tokens * shape.k)
        self.grid_blocks = max_blocks(tokens * shape.k, self.most, self.block_m)

    def align(self) -> tuple[Alignment, Blocks]:
        return align_in_blocks(self.chosen, self.layer.geometry.experts, self.block_m)

    def arrange(self) -> torch.Tensor:
        return arrange(self.x, self.layer.record, self.layer.scales)

    def gate_up(self, tile: Tile) -> None:
        part = self.layer
        where = (part.span, part.slot_of, part.pool, part.record, self.k, tile, self.mid, part.scales or NO_SCALES)
        if tile.block_m == 1:
            tri_few.gate_up(self.x, self.blocks, *where)
        else:
            tri.gate_up(self.left, self.blocks, self.grid_blocks, *where)

    def down(self, tile: Tile) -> None:
        part = self.layer
        where = (part.span, part.slot_of, part.pool, part.record, tile, self.rows, part.scales or NO_SCALES)
        if tile.block_m == 1:
            tri_few.down(self.mid, self.weights, self.blocks, *where)
        else:
            tri.down(self.mid, self.weights, self.blocks, self.grid_blocks, *where)

    def total(self) -> torch.Tensor:
        _, table_ = self.align()
        return self._computed(table_, self.layer.slot_of, self.layer.span)

    def decode(self) -> torch.Tensor:
        """With admission and the wait, as a decode step has it."""
        alignment, table_ = self.align()
        self.layer.admit(alignment.offsets)
        self.layer.wait()
        admission = self.layer.admission.device
        return self._computed(table_, admission.table, admission.spans[0])

    def _computed(self, table_: Blocks, slot_of: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
        part, x = self.layer, self.arrange()
        grouped_gemm_slots(
            x,
            self.weights,
            table_,
            part.pool,
            part.record,
            slot_of,
            span,
            self.most,
            self.rows,
            arranged=True,
            mid=self.mid,
            input_scales=part.scales,
        )
        return combine(self.rows, self.tokens)


def steps_of(layer: Layer, tokens: int, block_m: int | None = None) -> list[Step]:
    """Several routings while one leaves most experts out, or an expert would stay in L2 between two replays."""
    return [Step(layer, tokens, seed, block_m) for seed in range(16 if tokens <= 16 else 2)]


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
