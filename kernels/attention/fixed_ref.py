"""Plain torch: attention of kernels.online_softmax, in float32, for a chunk's rows and a decode step's alike."""

from functools import partial

import torch

from kernels.attention import ref
from kernels.attention.ref import by_head
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


decode_attention = partial(ref.decode_attention, attend=attention)


def in_order(pages_of_all: torch.Tensor, pages: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """[kv_heads, end - first, D] float32 of the positions first .. end - 1."""
    begin = first // pages_of_all.shape[1] * pages_of_all.shape[1]
    return by_head(pages_of_all, pages, begin, end)[:, first - begin :].to(torch.float32)
