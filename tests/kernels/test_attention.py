"""Paged attention against a naive float64 loop."""

import math

import pytest
import torch

from kernels.attention import attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """[n, heads * D] float64, one row and head at a time; k and v are [length, kv_heads, D]."""
    rows, heads, head_dim = q.shape
    out = torch.zeros(rows, heads, head_dim, dtype=torch.float64)
    group = heads // k.shape[1]
    for i in range(rows):
        for h in range(heads):
            keys, values = k[: start + i + 1, h // group].double(), v[: start + i + 1, h // group].double()
            out[i, h] = torch.softmax(scale * (keys @ q[i, h].double()), dim=0) @ values
    return out.flatten(1)


def paged(tensor: torch.Tensor, page_tokens: int, pages: list[int], num_pages: int) -> torch.Tensor:
    """[num_pages, page_tokens, kv_heads, D] with row r in page `pages[r // page_tokens]`; not a number elsewhere."""
    out = torch.full((num_pages, page_tokens, *tensor.shape[1:]), float("nan"), dtype=tensor.dtype)
    for position, row in enumerate(tensor):
        out[pages[position // page_tokens], position % page_tokens] = row
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (4, 2, 16), (6, 1, 24), (3, 3, 64)])
@pytest.mark.parametrize(
    ("rows", "start", "page_tokens"),
    [(0, 5, 4), (1, 0, 1), (1, 37, 16), (2, 0, 16), (16, 16, 16), (17, 15, 16), (33, 0, 5), (5, 128, 127)],
)
def test_prefill_with_a_cached_prefix_and_decode_are_those_of_the_naive_loop(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rows: int, start: int, page_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + start)
    length = start + rows
    q = torch.randn(rows, heads, head_dim, generator=generator).to(dtype)
    k, v = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    count = max(1, -(-length // page_tokens))
    pages = (torch.randperm(count, generator=generator) + 2).tolist()
    k_pages, v_pages = (paged(tensor, page_tokens, pages, count + 3) for tensor in (k, v))
    scale = 1 / math.sqrt(head_dim)
    out = attention(q, k_pages, v_pages, torch.tensor(pages), start, scale)
    assert out.shape == (rows, heads * head_dim) and out.dtype == dtype
    torch.testing.assert_close(out.double(), naive(q, k, v, start, scale), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [511, 512, 513])
def test_chunks_longer_than_a_query_block(rows: int) -> None:
    """Against the naive loop at rows around the block's edge."""
    generator = torch.Generator().manual_seed(rows)
    start, page_tokens = 9, 16
    q = torch.randn(rows, 2, 8, generator=generator)
    k, v = (torch.randn(start + rows, 1, 8, generator=generator) for _ in range(2))
    pages = list(range(-(-(start + rows) // page_tokens)))
    k_pages, v_pages = (paged(tensor, page_tokens, pages, len(pages)) for tensor in (k, v))
    out = attention(q, k_pages, v_pages, torch.tensor(pages), start, 0.3)
    for row in {0, 1, rows - 2, rows - 1}:
        expected = naive(q[row : row + 1], k, v, start + row, 0.3)
        torch.testing.assert_close(out[row : row + 1].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("q", "kv", "pages", "start"),
    [
        ((3, 4, 8), (2, 4, 3, 8), 2, 0),
        ((3, 4, 8), (2, 4, 2, 6), 2, 0),
        ((3, 4, 8), (2, 4, 2, 8), 2, 6),
        ((3, 4, 8), (2, 4, 2, 8), 2, -1),
        ((3, 32), (2, 4, 2, 8), 2, 0),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q: tuple[int, ...], kv: tuple[int, ...], pages: int, start: int) -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match=r"fit|expected"):
        attention(torch.zeros(q), torch.zeros(kv), torch.zeros(kv), torch.arange(pages), start, 1.0)
