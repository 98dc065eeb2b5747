"""Plain torch: the pages are gathered, torch's scaled_dot_product_attention does the rest."""

import torch
from torch.nn import functional

QUERY_BLOCK = 512
"""Rows of q per call when a mask is needed, so that the mask stays [512, length] however long the chunk is."""


def attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, pages: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    rows, heads, head_dim = q.shape
    if rows == 0:
        return q.reshape(0, heads * head_dim)
    k = _by_head(k_pages, pages, start + rows)
    v = _by_head(v_pages, pages, start + rows)
    if rows == 1:
        return _one_row(q[0], k, v, scale).reshape(1, heads * head_dim)
    group = heads // k.shape[0]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    return _rows(q.transpose(0, 1), k, v, start, scale).transpose(0, 1).reshape(rows, heads * head_dim)


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
    for row, length in enumerate(lengths.tolist()):
        if length:
            pages = table[row].to(torch.int64)
            out[row] = attention(q[row : row + 1], k_pages, v_pages, pages, length - 1, scale)[0]
    return out


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    k_pages[pages, offsets] = k
    v_pages[pages, offsets] = v


def _by_head(pages_of_all: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """[kv_heads, length, D] of the positions 0 .. length - 1."""
    used = pages[: -(-length // pages_of_all.shape[1])]
    return pages_of_all[used].flatten(0, 1)[:length].transpose(0, 1)


def _one_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, D]: the heads that share a kv head are rows over it, so that k and v are not repeated."""
    grouped = q.view(k.shape[0], -1, q.shape[1])
    return functional.scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale)


def _rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """[heads, n, D]: block by block, row i over the first start + i + 1 keys."""
    outs: list[torch.Tensor] = []
    for first in range(0, q.shape[1], QUERY_BLOCK):
        block = q[:, first : first + QUERY_BLOCK]
        length = start + first + block.shape[1]
        visible = torch.ones(block.shape[1], length, dtype=torch.bool, device=q.device).tril(start + first)
        outs.append(
            functional.scaled_dot_product_attention(
                block[None], k[None, :, :length], v[None, :, :length], attn_mask=visible, scale=scale
            )[0]
        )
    return torch.cat(outs, dim=1)
