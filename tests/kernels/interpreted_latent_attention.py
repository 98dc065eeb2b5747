"""A script: latent attention's Triton kernels in the interpreter, in float32, against the plain-torch reference.

And as equality of bits: a decode row alone, and a chunk's row in another chunk.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.latent_attention import ref, tri
from kernels.latent_attention.cost import Tile

WHOLE = Tile(block_m=16, block_n=16, chunk=64, block_v=64, stages=0, warps=4)
IN_PARTS = WHOLE._replace(chunk=16, block_v=16)

for rows, start, heads, rank, rope, page_tokens, splits, tile in (
    (0, 3, 2, 16, 4, 4, 1, WHOLE),
    (1, 0, 1, 24, 2, 16, 1, WHOLE),
    (1, 70, 12, 16, 8, 16, 4, WHOLE),
    (5, 33, 6, 40, 8, 16, 4, IN_PARTS),
    (9, 15, 2, 64, 16, 16, 2, WHOLE),
    (3, 20, 18, 32, 6, 5, 1, IN_PARTS),
):
    generator = torch.Generator().manual_seed(rows)
    length = start + rows
    count = max(1, -(-length // page_tokens))
    latents = torch.randn(count + 2, page_tokens, 1, rank, generator=generator)
    ropes = torch.randn(count + 2, page_tokens, 1, rope, generator=generator)
    pages = torch.randperm(count, generator=generator) + 1
    past = length - (count - 1) * page_tokens  # what lies past the end need not be numbers
    latents[pages[-1], past:], ropes[pages[-1], past:] = float("nan"), float("nan")
    q = torch.randn(heads, rows, rank, generator=generator).transpose(0, 1)
    q_rope = torch.randn(rows, heads, rope + 3, generator=generator)[..., 3:]
    kept = (latents, ropes)
    actual = tri.latent_attention(q, q_rope, *kept, pages, start, 0.3, (tile, splits))
    expected = ref.latent_attention(q, q_rope, *kept, pages, start, 0.3)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for first in range(0, rows, 4) if splits == 1 else ():
        part = slice(first, first + 4)
        alone = tri.latent_attention(q[part], q_rope[part], *kept, pages, start + first, 0.3, (tile, 1))
        assert torch.equal(alone, actual[part])

for lengths, heads, rank, rope, page_tokens, tile in (
    ([], 2, 16, 4, 16, WHOLE),
    ([1, 0, 16, 17, 70], 12, 24, 8, 16, WHOLE),
    ([33, 2], 18, 32, 4, 4, IN_PARTS),
):
    generator = torch.Generator().manual_seed(len(lengths))
    latents, ropes = (torch.randn(60, page_tokens, 1, width, generator=generator) for width in (rank, rope))
    kept = (latents, ropes)
    width = -(-max(lengths, default=0) // page_tokens) + 2
    table = torch.randint(0, 60, (len(lengths), width), dtype=torch.int32, generator=generator)
    counts = torch.tensor(lengths, dtype=torch.int32)
    q = torch.randn(len(lengths), heads, rank, generator=generator)
    q_rope = torch.randn(len(lengths), heads, rope, generator=generator)
    actual = tri.decode_latent_attention(q, q_rope, *kept, table, counts, 0.3, (tile, 4))
    expected = ref.decode_latent_attention(q, q_rope, *kept, table, counts, 0.3)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for row, length in enumerate(lengths):
        own = table[row : row + 1, : max(1, -(-length // page_tokens))]
        one = slice(row, row + 1)
        alone = tri.decode_latent_attention(q[one], q_rope[one], *kept, own, counts[one], 0.3, (tile, 4))
        assert torch.equal(alone, actual[one])

for rows, rank, rope in ((0, 4, 2), (1, 8, 8), (5, 24, 6), (3, 512, 64)):
    generator = torch.Generator().manual_seed(rows)
    kv = torch.randn(rows, 1, rank + rope, generator=generator)
    places = torch.randperm(rows + 9, generator=generator)[:rows]
    stored = [[torch.zeros(rows + 2, 5, 1, width) for width in (rank, rope)] for _ in range(2)]
    for module, pools in zip((tri, ref), stored, strict=True):
        module.store_latent(kv[..., :rank], kv[..., rank:], pools[0], pools[1], places // 5, places % 5)
    assert torch.equal(stored[0][0], stored[1][0]) and torch.equal(stored[0][1], stored[1][1])
print("ok")
