"""Plain torch: attention of kernels.online_softmax, in float32, for a chunk's rows and a decode step's alike."""

import torch

from kernels.online_softmax import Rows, attended


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    (rows, heads, head_dim), kv_heads = q.shape, k_pages.shape[2]
    grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
    by_head = None if sinks is None else sinks.view(kv_heads, -1)

    def block(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        return in_order(k_pages, pages, first, end), in_order(v_pages, pages, first, end)

    out = attended(Rows(grouped, start, scale, window, by_head), head_dim, block)
    return out.reshape(rows, heads * head_dim).to(q.dtype)


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
    for row, length in enumerate(lengths.tolist()):
        if length:
            pages = table[row].to(torch.int64)
            out[row] = attention(q[row : row + 1], k_pages, v_pages, pages, length - 1, scale, window, sinks)[0]
    return out


def in_order(pages_of_all: torch.Tensor, pages: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """[kv_heads, end - first, D] float32 of the positions first .. end - 1."""
    page_tokens = pages_of_all.shape[1]
    page = first // page_tokens
    used = pages_of_all[pages[page : -(-end // page_tokens)]].flatten(0, 1)
    return used[first - page * page_tokens : end - page * page_tokens].transpose(0, 1).to(torch.float32)
