"""Admission and grouped GEMM together: each routed row is computed once, by the right expert, whatever is copied.

The launches are those of a schedule that is fixed before anything is known of the routing, as a captured step has them:
for each query that there can be, its admission, its copies, and the GEMM over its bounds; or, streamed, for each part
of the layer. Used by test_admit_triton.py,
on a GPU and, as a program, in the interpreter: `python -m tests.kernels.admitted_rows seed count`.
"""

import random
import sys

import torch

from copyengine.ring import CopyQuery, Limits, RingReader
from kernels import admit
from kernels.grouped_gemm import block_rows, grouped_gemm, grouped_gemm_slots
from kernels.moe_align import blocks, moe_align
from kernels.topk_route import topk_route
from tests.kernels.admit_histories import FIRST_FLAG, Pair, Size, most_flags
from tests.kernels.expert_records import Experts

HIDDEN, INTERMEDIATE = 16, 16
SIZES = [
    Size(layers, experts, slots, max_query, 16)
    for layers in (1, 2)
    for experts, slots in ((5, 3), (5, 5), (8, 3), (8, 12), (24, 9), (24, 24), (24, 30))
    for max_query in (2, 7, 128)
    if admit.most_queries(experts, slots, max_query) <= 6
]


class Layers:
    """L layers of experts in banks, and a pool on the device that their records are copied into."""

    def __init__(self, size: Size, device: str, generator: torch.Generator) -> None:
        self.size = size
        self.pair = Pair(size, device)
        self.layers = [Experts("float32", HIDDEN, INTERMEDIATE, size.experts, generator) for _ in range(size.layers)]
        self.layout = self.layers[0].layout
        groups, group_slots = 2, 3
        flags = torch.ones(groups, dtype=torch.int32, device=device)
        first_flag = FIRST_FLAG + most_flags(size)
        self.stream = admit.new_device_stream(
            self.pair.state, self.pair.device, flags, first_flag, size.slots, group_slots, groups
        )
        pool_slots = size.slots + groups * group_slots
        self.pair.reader = RingReader(
            self.pair.memory.numpy(), Limits(size.layers, size.experts, pool_slots, first_flag + groups)
        )
        self.pool = torch.full((pool_slots, self.layout.record_nbytes), 0xFF, dtype=torch.uint8, device=device)

    def copy(self) -> None:
        """What the ring asks for."""
        if self.pool.is_cuda:
            torch.cuda.synchronize()
        while (record := self.pair.reader.poll()) is not None:
            assert isinstance(record, CopyQuery)
            records = self.layers[record.layer].records[list(record.experts)]
            self.pool[list(record.slots)] = records.to(self.pool.device)

    def step(self, step: "Step", layer: int) -> None:
        """On demand: one layer's step."""
        size, pair = self.size, self.pair
        most = min(size.experts, step.chosen.numel())
        launches = admit.launches(size.experts, size.slots, size.max_query, most)
        for query in range(admit.most_queries(most, size.slots, size.max_query)):
            if query < launches:
                admit.admit_layer(pair.state, pair.device, layer, step.alignment.offsets, query)
                self.copy()
            step.compute(self, pair.device.table, pair.device.spans[query])
        step.check(self, layer)

    def streamed(self, step: "Step", layer: int) -> None:
        """Streamed: one layer's step."""
        for part in range(self.stream.parts):
            turn = part % self.stream.groups
            admit.request_part(self.pair.state, self.pair.device, self.stream, layer, part, turn)
            self.copy()
            step.compute(self, self.stream.tables[turn], self.stream.spans[part])
        step.check(self, layer)


class Step:
    """T tokens routed at random; what was computed of their rows, and how often."""

    def __init__(self, layers: Layers, tokens: int, k: int, generator: torch.Generator) -> None:
        experts, device = layers.size.experts, layers.pool.device
        self.x = torch.randn(tokens, HIDDEN, generator=generator)
        self.weights, self.chosen = topk_route(torch.randn(tokens, experts, generator=generator), k, True)
        self.alignment = moe_align(self.chosen.to(device), experts)
        self.blocks = blocks(self.alignment, block_rows(tokens, k, experts, layers.layout, device))
        self.times = torch.zeros(tokens * k, dtype=torch.int32)
        self.total = torch.zeros(tokens * k, HIDDEN)

    def compute(self, layers: Layers, table: torch.Tensor, span: torch.Tensor) -> None:
        """One launch, into rows that nothing has been written to."""
        device, most = layers.pool.device, min(layers.size.experts, self.chosen.numel())
        rows = torch.full_like(self.total, float("nan"), device=device)
        x, weights = self.x.to(device), self.weights.to(device)
        grouped_gemm_slots(x, weights, self.blocks, layers.pool, layers.layout, table, span, most, rows)
        written = ~rows.isnan().all(1).cpu()
        self.times += written
        self.total[written] = rows.cpu()[written]

    def check(self, layers: Layers, layer: int) -> None:
        """Against the reference over all of the layer's records."""
        assert (self.times == 1).all(), self.times.tolist()
        everything = list(range(layers.size.experts))
        pool = layers.layers[layer].pool(len(everything), {e: e for e in everything})
        expected = torch.empty_like(self.total)
        alignment = moe_align(self.chosen, len(everything))
        grouped_gemm(self.x, self.weights, alignment, pool, layers.layout, everything, everything, expected)
        assert (self.total - expected).norm() <= 1e-5 * expected.norm()


def run(seed: int, count: int, device: str) -> None:
    """`count` pools, a few steps each."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(count):
        size = rng.choice(SIZES)
        layers = Layers(size, device, generator)
        for _ in range(4):
            step = Step(layers, rng.randint(1, 12), rng.randint(1, min(4, size.experts)), generator)
            run_layer = rng.choice([layers.step, layers.streamed])
            run_layer(step, rng.randrange(size.layers))


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), "cpu")
