"""Causal attention of one sequence's new tokens over its KV pages."""

import torch

from kernels.attention import ref


def attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, pages: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """softmax(scale * q k^T) v of the tokens at positions start .. start + n - 1, each over positions up to its own.

    `q` is [n, heads, D]; `k_pages` and `v_pages` are [num_pages, page_tokens, kv_heads, D] and hold the new tokens too;
    `pages` [P] int64 are the pages of positions 0 .. start + n - 1, in order (further pages are not read). Head h reads
    kv head h // (heads / kv_heads). Returns [n, heads * D]. ValueError for shapes that do not fit together.
    """
    if q.ndim != 3 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"expected q [n, heads, D] and equal k, v pages [num_pages, page_tokens, kv_heads, D], "
            f"not {tuple(q.shape)}, {tuple(k_pages.shape)}, {tuple(v_pages.shape)}"
        )
    rows, heads, head_dim = q.shape
    _, page_tokens, kv_heads, kv_dim = k_pages.shape
    if kv_dim != head_dim or heads % kv_heads:
        raise ValueError(f"{heads} heads of {head_dim} do not fit {kv_heads} kv heads of {kv_dim}")
    if pages.ndim != 1 or start < 0 or start + rows > pages.shape[0] * page_tokens:
        raise ValueError(f"positions {start} .. {start + rows - 1} do not fit {tuple(pages.shape)} pages")
    return ref.attention(q, k_pages, v_pages, pages, start, scale)
