"""Admission and grouped GEMM together: every routed row is computed once, by the right expert, whatever had to be copied.

The launches are those of a schedule that is fixed before anything is known of the routing, as a captured step has them:
for each query that there can be, its admission, its copies, and the GEMM over its bounds. Used by test_admit_triton.py,
on a GPU and, as a program, in the interpreter: `python -m tests.kernels.admitted_rows seed count`.
"""

import random
import sys

import torch

from copyengine.ring import CopyQuery
from kernels import admit
from kernels.grouped_gemm import block_rows, grouped_gemm, grouped_gemm_slots
from kernels.moe_align import blocks, moe_align
from kernels.topk_route import topk_route
from tests.kernels.admit_histories import Pair, Size
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
        self.pool = torch.full((size.slots, self.layout.record_nbytes), 0xFF, dtype=torch.uint8, device=device)

    def copy(self) -> None:
        """What the ring asks for."""
        while (record := self.pair.reader.poll()) is not None:
            assert isinstance(record, CopyQuery)
            records = self.layers[record.layer].records[list(record.experts)]
            self.pool[list(record.slots)] = records.to(self.pool.device)

    def step(self, layer: int, tokens: int, k: int, generator: torch.Generator) -> None:
        """One layer's step against the reference over all experts' records."""
        size, pair, device = self.size, self.pair, self.pool.device
        x = torch.randn(tokens, HIDDEN, generator=generator)
        weights, chosen = topk_route(torch.randn(tokens, size.experts, generator=generator), k, True)
        alignment = moe_align(chosen.to(device), size.experts)
        table = blocks(alignment, block_rows(tokens, k, size.experts, self.layout))
        most = min(size.experts, tokens * k)
        launches = admit.launches(size.experts, size.slots, size.max_query, most)
        times = torch.zeros(tokens * k, dtype=torch.int32)
        total = torch.zeros(tokens * k, HIDDEN)
        for query in range(admit.most_queries(most, size.slots, size.max_query)):
            if query < launches:
                admit.admit_layer(pair.state, pair.device, layer, alignment.offsets, query)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                self.copy()
            rows = torch.full((tokens * k, HIDDEN), float("nan"), device=device)
            grouped_gemm_slots(
                x.to(device),
                weights.to(device),
                table,
                self.pool,
                self.layout,
                pair.device.table,
                pair.device.spans[query],
                most,
                rows,
            )
            written = ~rows.isnan().all(1).cpu()
            assert torch.isfinite(rows[written.to(device)]).all()
            times += written
            total[written] = rows.cpu()[written]
        assert (times == 1).all(), times.tolist()
        expected = torch.empty(tokens * k, HIDDEN)
        everything = list(range(size.experts))
        whole = self.layers[layer].pool(size.experts, {e: e for e in everything})
        grouped_gemm(x, weights, moe_align(chosen, size.experts), whole, self.layout, everything, everything, expected)
        assert (total - expected).norm() <= 1e-5 * expected.norm()


def run(seed: int, count: int, device: str) -> None:
    """`count` pools, a few steps each."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(count):
        size = rng.choice(SIZES)
        layers = Layers(size, device, generator)
        for _ in range(4):
            k = rng.randint(1, min(4, size.experts))
            layers.step(rng.randrange(size.layers), rng.randint(1, 12), k, generator)


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), "cpu")
