"""A script: norm_rope's Triton kernel in the interpreter, in float32, against the plain-torch reference."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.rope import ref, tri

CASES = [(0, 2, 1, 4, 2), (1, 1, 1, 2, 1), (3, 5, 2, 6, 2), (2, 24, 2, 256, 32), (5, 4, 4, 96, 48), (2, 9, 1, 64, 32)]
"""T, heads, kv_heads, D, pairs that are turned; the norms of those where not all are turned are zero-centred."""

for tokens, heads, kv_heads, head_dim, half in CASES:
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator) * 5
    q, k, _ = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    angles = torch.rand(tokens, half, generator=generator) * 100
    q_weight, k_weight = torch.randn(2, head_dim, generator=generator)
    zero_centred = 2 * half < head_dim
    for left_weight, right_weight in ((q_weight, k_weight), (None, None), (q_weight, None)):
        for left, right in ((q, k), (q.contiguous(), k.transpose(0, 1).contiguous().transpose(0, 1))):
            inputs = (left, right, left_weight, right_weight, 1e-6, angles.cos(), angles.sin(), zero_centred)
            actual, expected = tri.norm_rope(*inputs), ref.norm_rope(*inputs)
            for ours, theirs in zip(actual, expected, strict=True):
                assert ours.is_contiguous()
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
print("ok")
