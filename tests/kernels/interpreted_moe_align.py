"""A script: the Triton kernels of moe_align in the interpreter, against the plain-torch reference."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.moe_align import max_blocks, ref, tri

CASES = [(1, 0, 1), (1, 1, 1), (8, 8, 8), (512, 13, 5), (1023, 32, 2), (1024, 43, 3), (2100, 100, 2)]
"""E, T, K."""

CHUNK = 64
"""More routes than this take several programs."""

for num_experts, tokens, k in CASES:
    generator = torch.Generator().manual_seed(num_experts)
    experts = torch.randint(0, num_experts, (tokens, k), dtype=torch.int32, generator=generator)
    routes, offsets = ref.moe_align(experts, num_experts)
    actual_routes, actual_offsets = tri.moe_align(experts, num_experts, CHUNK)
    assert torch.equal(actual_routes, routes) and torch.equal(actual_offsets, offsets)
    bound = max_blocks(tokens * k, num_experts, 16)
    starts, *table = ref.blocks(offsets, 16, bound)
    actual_starts, *actual_table = tri.blocks(offsets, 16, bound)
    used = int(starts[-1])
    assert torch.equal(actual_starts, starts)
    for actual, expected in zip(actual_table, table, strict=True):
        assert torch.equal(actual[:used], expected[:used])
print("ok")
