"""A script: attention with one order of sums in the interpreter, in float32, of keys and values and of latents.

Against the plain-torch references, and as equality of bits: a row of a chunk, of any other chunk, and decoded.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.attention import fixed_tri, ref
from kernels.attention.cost import Tile
from kernels.latent_attention import cost as latent_cost
from kernels.latent_attention import fixed_tri as latent_tri
from kernels.latent_attention import ref as latent_ref

TILE = Tile(block_m=16, block_n=16, chunk=16, stages=0, warps=4)
LATENT = latent_cost.Tile(block_m=16, block_n=16, chunk=64, block_v=64, stages=0, warps=4)
SHARE = 16


def context(length: int, page_tokens: int, widths: tuple[int, ...], heads: int) -> tuple[list[torch.Tensor], ...]:
    """Pages of two kinds, and a page table [1, P]; what lies past the end is no number."""
    generator = torch.Generator().manual_seed(length)
    count = -(-length // page_tokens)
    pages = torch.randperm(count, generator=generator) + 1
    stored = [torch.randn(count + 2, page_tokens, heads, width, generator=generator) for width in widths]
    past = length - (count - 1) * page_tokens
    for tensor in stored:
        tensor[pages[-1], past:] = float("nan")
    return stored, [pages, pages.to(torch.int32)[None]]


for length, heads, kv_heads, head_dim, page_tokens, window, with_sinks in (
    (1, 1, 1, 8, 16, None, False),
    (35, 4, 1, 16, 5, 18, True),
    (20, 6, 2, 24, 16, None, False),
):
    (k_pages, v_pages), (pages, table) = context(length, page_tokens, (head_dim, head_dim), kv_heads)
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(length, heads, head_dim, generator=generator)
    kind = (window, torch.randn(heads, generator=generator) if with_sinks else None)
    kept = (k_pages, v_pages)
    whole = fixed_tri.attention(q, *kept, pages, 0, 0.3, *kind, TILE, SHARE)
    expected = ref.attention(q, *kept, pages, 0, 0.3, *kind)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    for first in range(0, length, 14):
        part = slice(first, min(first + 14, length))
        alone = fixed_tri.attention(q[part], *kept, pages, first, 0.3, *kind, TILE, SHARE)
        assert torch.equal(alone, whole[part]), (length, first)
    rows = sorted({0, length // 2, length - 1})
    lengths = torch.tensor([row + 1 for row in rows] + [0], dtype=torch.int32)
    tables = torch.cat([table.repeat(len(rows) + 1, 1), torch.zeros(len(rows) + 1, 3, dtype=torch.int32)], dim=1)
    decoded = fixed_tri.decode_attention(q[[*rows, 0]], *kept, tables, lengths, 0.3, *kind, TILE, SHARE)
    assert torch.equal(decoded[:-1], whole[rows]) and not decoded[-1].any()

for length, heads, rank, rope, page_tokens, tile in (
    (35, 3, 32, 8, 5, LATENT._replace(chunk=16, block_v=16)),
    (20, 18, 24, 4, 16, LATENT),
):
    (latents, ropes), (pages, table) = context(length, page_tokens, (rank, rope), 1)
    generator = torch.Generator().manual_seed(heads)
    q, q_rope = (torch.randn(length, heads, width, generator=generator) for width in (rank, rope))
    whole = latent_tri.latent_attention(q, q_rope, latents, ropes, pages, 0, 0.3, tile, SHARE)
    expected = latent_ref.latent_attention(q, q_rope, latents, ropes, pages, 0, 0.3)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    for first in range(0, length, 14):
        part = slice(first, min(first + 14, length))
        alone = latent_tri.latent_attention(q[part], q_rope[part], latents, ropes, pages, first, 0.3, tile, SHARE)
        assert torch.equal(alone, whole[part]), (length, first)
    rows = sorted({0, length // 2, length - 1})
    lengths = torch.tensor([row + 1 for row in rows], dtype=torch.int32)
    tables = table.repeat(len(rows), 1)
    decoded = latent_tri.decode_latent_attention(
        q[rows], q_rope[rows], latents, ropes, tables, lengths, 0.3, tile, SHARE
    )
    assert torch.equal(decoded, whole[rows])
print("ok")
