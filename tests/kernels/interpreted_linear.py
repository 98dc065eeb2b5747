"""A script: the Triton product in the interpreter, in float32, against the plain-torch reference.

And as equality of bits: a row alone, and in any number of rows.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.linear import ref, tri
from kernels.linear.cost import Tile

TILE = Tile(block_m=16, block_n=16, block_k=16, stages=0, warps=4)

for tokens, out_features, columns in ((0, 3, 4), (1, 1, 1), (5, 17, 40), (16, 16, 16), (17, 61, 33), (33, 130, 7)):
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(out_features, columns, generator=generator)
    x = torch.randn(tokens, columns, generator=generator)
    for bias in (None, torch.randn(out_features, generator=generator)):
        actual = tri.linear(x, weight, bias, TILE)
        torch.testing.assert_close(actual, ref.linear(x, weight, bias, 16), atol=1e-5, rtol=1e-5)
        for first, count in ((0, 1), (0, 16), (3, 2), (tokens - 1, 1)):
            part = slice(max(0, first), first + count)
            assert torch.equal(tri.linear(x[part], weight, bias, TILE), actual[part])

for tokens, heads, columns, out_features in ((0, 2, 4, 4), (1, 1, 8, 3), (5, 3, 20, 16), (18, 4, 16, 33)):
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(heads, columns, out_features, generator=generator)
    x = torch.randn(tokens, heads, columns + 4, generator=generator)[..., 2:-2]
    actual = tri.heads_linear(x, weight, TILE)
    torch.testing.assert_close(actual, ref.heads_linear(x, weight, 16), atol=1e-5, rtol=1e-5)
    for row in range(tokens):
        assert torch.equal(tri.heads_linear(x[row : row + 1], weight, TILE), actual[row : row + 1])
print("ok")
