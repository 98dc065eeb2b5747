"""A script: the Triton kernels of moe_align in the interpreter, against the plain-torch reference."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.moe_align import max_blocks, ref, tri

CASES = [
    (1, 0, 1),
    (1, 1, 1),
    (8, 8, 8),
    (512, 13, 5),
    (1023, 32, 2),
    (1024, 43, 3),
    (2100, 100, 2),
    (5, 16, 4),
    (1, 17, 1),
]
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
    for rows in (1, 3, 16):
        bound = max_blocks(tokens * k, num_experts, rows)
        starts, *table = ref.blocks(offsets, rows, bound)
        used = int(starts[-1])
        for few in (64, 8):  # compared with each other; sorted; in several chunks
            in_one = sum(tri.align_in_blocks(experts, num_experts, rows, bound, few, CHUNK), ())
            assert all(torch.equal(*pair) for pair in zip(in_one[:3], (routes, offsets, starts), strict=True))
            assert all(torch.equal(a[:used], b[:used]) for a, b in zip(in_one[3:], table, strict=True))
print("ok")
