"""A script: attention's Triton kernels in the interpreter, in float32, against the plain-torch reference.

And as equality of bits: a decode row alone, and a chunk's row in another chunk.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.attention import ref, tri
from kernels.attention.cost import Tile

TILE = Tile(block_m=16, block_n=16, chunk=16, stages=0, warps=4)


def pool(page_tokens: int, count: int, kv_heads: int, head_dim: int, generator: torch.Generator) -> torch.Tensor:
    """k and v pages [2, count, page_tokens, kv_heads, D]."""
    return torch.randn(2, count, page_tokens, kv_heads, head_dim, generator=generator)


for rows, start, heads, kv_heads, head_dim, page_tokens, splits, window, with_sinks in (
    (0, 3, 2, 1, 16, 4, 1, None, False),
    (1, 0, 1, 1, 8, 16, 1, None, False),
    (1, 70, 12, 1, 16, 16, 4, None, False),
    (7, 0, 4, 2, 24, 4, 1, None, False),
    (5, 33, 6, 2, 32, 16, 4, None, False),
    (17, 15, 3, 3, 16, 16, 2, None, False),
    (3, 47, 16, 1, 40, 5, 8, None, False),
    (7, 30, 4, 2, 24, 4, 1, 1, True),
    (21, 90, 3, 3, 16, 16, 1, 18, False),
    (5, 33, 6, 2, 32, 16, 4, None, True),
    (23, 77, 10, 2, 16, 16, 4, 33, True),
    (1, 70, 12, 1, 16, 16, 2, 70, True),
    (9, 3, 4, 2, 16, 4, 2, 500, True),
):
    generator = torch.Generator().manual_seed(rows)
    length = start + rows
    count = max(1, -(-length // page_tokens))
    k_pages, v_pages = pool(page_tokens, count + 2, kv_heads, head_dim, generator)
    pages = torch.randperm(count, generator=generator) + 1
    past = length - (count - 1) * page_tokens  # what lies past the end need not be numbers
    k_pages[pages[-1], past:], v_pages[pages[-1], past:] = float("nan"), float("nan")
    q = torch.randn(rows, heads + 2, head_dim, generator=generator)[:, 1:-1]
    kind = (window, torch.randn(heads, generator=generator) if with_sinks else None)
    unread = pages.clone()  # what the table says of pages before the block with the first position seen is not used
    first_read = max(0, start - (window or start + 1) + 1) // TILE.block_n * TILE.block_n
    unread[: first_read // page_tokens] = 1 << 40
    actual = tri.attention(q, k_pages, v_pages, unread, start, 0.3, *kind, (TILE, splits))
    expected = ref.attention(q, k_pages, v_pages, pages, start, 0.3, *kind)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for first in range(0, rows, 4) if splits == 1 else ():
        part = tri.attention(q[first : first + 4], k_pages, v_pages, pages, start + first, 0.3, *kind, (TILE, 1))
        assert torch.equal(part, actual[first : first + 4])

for lengths, heads, kv_heads, head_dim, page_tokens, window, with_sinks in (
    ([], 2, 1, 16, 16, None, False),
    ([1, 0, 16, 17, 100, 63], 12, 1, 24, 16, None, False),
    ([33, 2], 4, 2, 32, 4, None, False),
    ([31], 17, 1, 16, 1, None, False),
    ([1, 0, 16, 17, 100, 63], 12, 1, 24, 16, 17, True),
    ([33, 2], 4, 2, 32, 4, 1, False),
    ([90, 5, 0], 17, 1, 16, 1, None, True),
):
    generator = torch.Generator().manual_seed(len(lengths))
    tile = TILE if heads // kv_heads <= 16 else TILE._replace(block_m=32)
    k_pages, v_pages = pool(page_tokens, 120, kv_heads, head_dim, generator)
    width = -(-max(lengths, default=0) // page_tokens) + 2
    table = torch.randint(0, 120, (len(lengths), width), dtype=torch.int32, generator=generator)
    counts = torch.tensor(lengths, dtype=torch.int32)
    q = torch.randn(len(lengths), heads, head_dim, generator=generator)
    kind = (window, torch.randn(heads, generator=generator) if with_sinks else None)
    actual = tri.decode_attention(q, k_pages, v_pages, table, counts, 0.3, *kind, (tile, 4))
    expected = ref.decode_attention(q, k_pages, v_pages, table, counts, 0.3, *kind)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for row, length in enumerate(lengths):
        own = table[row : row + 1, : max(1, -(-length // page_tokens))]
        one, its_length = q[row : row + 1], counts[row : row + 1]
        alone = tri.decode_attention(one, k_pages, v_pages, own, its_length, 0.3, *kind, (tile, 4))
        assert torch.equal(alone, actual[row : row + 1])

for rows, kv_heads, head_dim in ((0, 1, 4), (1, 1, 8), (5, 3, 24), (3, 9, 128)):
    generator = torch.Generator().manual_seed(rows)
    k, v = torch.randn(2, rows, kv_heads + 1, head_dim, generator=generator)[:, :, 1:]
    places = torch.randperm(rows + 9, generator=generator)[:rows]
    actual, expected = torch.zeros(2, 2, rows + 2, 5, kv_heads, head_dim)
    tri.store_kv(k, v, actual[0], actual[1], places // 5, places % 5)
    ref.store_kv(k, v, expected[0], expected[1], places // 5, places % 5)
    assert torch.equal(actual, expected)
print("ok")
