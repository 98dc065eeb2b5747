"""Plain torch: the pages are gathered, torch's scaled_dot_product_attention does the rest, unless there are sinks."""

from collections.abc import Callable

import torch
from torch.nn import functional

QUERY_BLOCK = 512
"""Rows of q per call when a mask is needed, so that the mask stays [512, length] however long the chunk is."""
SINK_SCORES = 1 << 20
"""Scores of a block of rows with sinks, which are written out in float32, as long as one row has no more."""


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
    rows, heads, head_dim = q.shape
    if rows == 0:
        return q.reshape(0, heads * head_dim)
    first = _first(start, window, k_pages.shape[1])
    k, v = (by_head(of_all, pages, first, start + rows) for of_all in (k_pages, v_pages))
    if sinks is not None:
        return _with_sinks(q, k, v, start - first, scale, window, sinks)
    if rows == 1:
        seen = slice(_first(start, window, 1) - first, None)
        return _one_row(q[0], k[:, seen], v[:, seen], scale).reshape(1, heads * head_dim)
    group = heads // k.shape[0]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    out = _rows(q.transpose(0, 1), k, v, start - first, scale, window)
    return out.transpose(0, 1).reshape(rows, heads * head_dim)


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    attend: Callable[..., torch.Tensor] = attention,
) -> torch.Tensor:
    """Row by row, as `attend` has a chunk of one."""
    out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
    for row, length in enumerate(lengths.tolist()):
        if length:
            pages = table[row].to(torch.int64)
            out[row] = attend(q[row : row + 1], k_pages, v_pages, pages, length - 1, scale, window, sinks)[0]
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


def _first(position: int, window: int | None, page_tokens: int) -> int:
    """The first place of the page that holds the first position which `position` sees."""
    return 0 if window is None else max(0, position - window + 1) // page_tokens * page_tokens


def by_head(pages_of_all: torch.Tensor, pages: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """[kv_heads, end - first, D] of the positions first .. end - 1, of which `first` begins a page."""
    page_tokens = pages_of_all.shape[1]
    used = pages[first // page_tokens : -(-end // page_tokens)]
    return pages_of_all[used].flatten(0, 1)[: end - first].transpose(0, 1)


def _one_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, D]: the heads that share a kv head are rows over it, so that k and v are not repeated."""
    grouped = q.view(k.shape[0], -1, q.shape[1])
    return functional.scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale)


def _rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float, window: int | None
) -> torch.Tensor:
    """[heads, n, D]: block by block, row i over the first start + i + 1 keys, or the last `window` of these."""
    outs: list[torch.Tensor] = []
    for first in range(0, q.shape[1], QUERY_BLOCK):
        block = q[:, first : first + QUERY_BLOCK]
        begin, end = _first(start + first, window, 1), start + first + block.shape[1]
        visible = _visible(block.shape[1], start + first, begin, window, q.device)
        outs.append(
            functional.scaled_dot_product_attention(
                block[None], k[None, :, begin:end], v[None, :, begin:end], attn_mask=visible, scale=scale
            )[0]
        )
    return torch.cat(outs, dim=1)


def _visible(rows: int, start: int, begin: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[rows, start + rows - begin] bool: whether row i, at position start + i, sees position begin + j."""
    ones = torch.ones(rows, start + rows - begin, dtype=torch.bool, device=device)
    visible = ones.tril(start - begin)
    return visible if window is None else visible.triu(start - begin - window + 1)


def _with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """[n, heads * D]: in float32, a column of sinks beside the scores takes part in the softmax and in nothing else."""
    rows, heads, _ = q.shape
    outs: list[torch.Tensor] = []
    first = 0
    while first < rows:
        seen = start + first + 1 - _first(start + first, window, 1)
        block = q[first : first + max(1, SINK_SCORES // (heads * seen))].to(torch.float32)
        begin, end = _first(start + first, window, 1), start + first + block.shape[0]
        grouped = block.transpose(0, 1).reshape(k.shape[0], -1, *block.shape[::2])  # [kv_heads, group, n, D]
        scores = scale * grouped @ k[:, None, begin:end].to(torch.float32).mT
        visible = _visible(block.shape[0], start + first, begin, window, q.device)
        scores = scores.masked_fill(~visible, float("-inf"))
        column = sinks.view(k.shape[0], -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.softmax(torch.cat([scores, column], dim=3), dim=3)[..., :-1]
        out = shares @ v[:, None, begin:end].to(torch.float32)
        outs.append(out.flatten(0, 1).transpose(0, 1).flatten(1).to(q.dtype))
        first += block.shape[0]
    return torch.cat(outs)
