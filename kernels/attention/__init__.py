"""Causal attention over KV pages, and storing what it reads."""

import torch

from kernels.attention import cost, fixed_ref, ref


def attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    fixed: bool = False,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of the tokens at positions start .. start + n - 1, each over positions up to its own.

    With a `window` each token sees the last `window` positions alone, its own among them; pages before them are not
    read. `sinks` [heads] float32 is of each head a logit that joins the denominator of the softmax and nothing else.
    `q` is [n, heads, D]; `k_pages` and `v_pages` are [num_pages, page_tokens, kv_heads, D] and hold the new tokens too;
    `pages` [P] int64 are the pages of positions 0 .. start + n - 1, in order (further pages are not read). Head h reads
    kv head h // (heads / kv_heads). Returns [n, heads * D]. If it is `fixed`, a row's bits are those of
    `decode_attention` that is fixed, and depend neither on the chunk's other rows nor on where it starts. On a CUDA
    device nothing waits for it, and up to 32 heads share a kv head, of a D up to 256. ValueError for shapes that do not
    fit together.
    """
    _expect_heads(q, k_pages, v_pages)
    _expect_window_and_sinks(q, window, sinks)
    rows, page_tokens = q.shape[0], k_pages.shape[1]
    if pages.ndim != 1 or start < 0 or start + rows > pages.shape[0] * page_tokens:
        raise ValueError(f"positions {start} .. {start + rows - 1} do not fit {tuple(pages.shape)} pages")
    arguments = (q, k_pages, v_pages, pages, start, scale, window, sinks)
    if not q.is_cuda:
        return fixed_ref.attention(*arguments) if fixed else ref.attention(*arguments)
    _expect_on_device(q, k_pages, v_pages)
    if fixed:
        from kernels.attention import fixed_tri

        return fixed_tri.attention(*arguments)
    from kernels.attention import tri

    return tri.attention(*arguments)


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    fixed: bool = False,
) -> torch.Tensor:
    """`attention` of one new token of each of B sequences: row b over the positions 0 .. lengths[b] - 1.

    `q` is [B, heads, D]; `table` [B, P] int32, of whose row b the first ceil(lengths[b] / page_tokens) pages are read,
    in order; `lengths` [B] int32 count the new token, and a row of length 0 gives zeros. Pages, `window`, `sinks` and
    `fixed` as for `attention`.
    Returns [B, heads * D]. A row depends on its own sequence only: not on B, not on P. On a CUDA device nothing waits
    for it, the launches do not depend on the lengths, and values in tensors are not checked. ValueError for shapes or
    types that do not fit together.
    """
    _expect_heads(q, k_pages, v_pages)
    _expect_window_and_sinks(q, window, sinks)
    rows = q.shape[0]
    if table.ndim != 2 or table.shape[0] != rows or table.dtype != torch.int32:
        raise ValueError(f"table must be an int32 [{rows}, P] tensor, not {table.dtype} {tuple(table.shape)}")
    if tuple(lengths.shape) != (rows,) or lengths.dtype != torch.int32:
        raise ValueError(f"lengths must be an int32 [{rows}] tensor, not {lengths.dtype} {tuple(lengths.shape)}")
    arguments = (q, k_pages, v_pages, table, lengths, scale, window, sinks)
    if not q.is_cuda:
        return fixed_ref.decode_attention(*arguments) if fixed else ref.decode_attention(*arguments)
    _expect_on_device(q, k_pages, v_pages)
    if fixed:
        from kernels.attention import fixed_tri

        return fixed_tri.decode_attention(*arguments)
    from kernels.attention import tri

    return tri.decode_attention(*arguments)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Row i of `k` and `v` [T, kv_heads, D] goes to page `pages[i]` at place `offsets[i]` ([T] int64 each).

    Pages as for `attention`, of the type of k and v. On a CUDA device it is one launch, and values in tensors are not
    checked. ValueError for shapes or types that do not fit together.
    """
    if k.ndim != 3 or k_pages.ndim != 4 or k.shape != v.shape or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"expected equal k, v [T, kv_heads, D] and equal k, v pages [num_pages, page_tokens, kv_heads, D], "
            f"not {tuple(k.shape)}, {tuple(v.shape)}, {tuple(k_pages.shape)}, {tuple(v_pages.shape)}"
        )
    if k.shape[1:] != k_pages.shape[2:] or len({k.dtype, v.dtype, k_pages.dtype, v_pages.dtype}) > 1:
        raise ValueError(f"{k.dtype} {tuple(k.shape)} does not fit {k_pages.dtype} pages {tuple(k_pages.shape)}")
    for name, places in (("pages", pages), ("offsets", offsets)):
        if tuple(places.shape) != k.shape[:1] or places.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 [{k.shape[0]}], not {places.dtype} {tuple(places.shape)}")
    if not k.is_cuda:
        ref.store_kv(k, v, k_pages, v_pages, pages, offsets)
        return
    _expect_contiguous(k_pages, v_pages)
    from kernels.attention import tri

    tri.store_kv(k, v, k_pages, v_pages, pages, offsets)


def _expect_heads(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    if q.ndim != 3 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"expected q [n, heads, D] and equal k, v pages [num_pages, page_tokens, kv_heads, D], "
            f"not {tuple(q.shape)}, {tuple(k_pages.shape)}, {tuple(v_pages.shape)}"
        )
    heads, head_dim = q.shape[1:]
    kv_heads, kv_dim = k_pages.shape[2:]
    if kv_dim != head_dim or heads % kv_heads:
        raise ValueError(f"{heads} heads of {head_dim} do not fit {kv_heads} kv heads of {kv_dim}")


def _expect_window_and_sinks(q: torch.Tensor, window: int | None, sinks: torch.Tensor | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    if sinks is not None and (tuple(sinks.shape) != q.shape[1:2] or sinks.dtype != torch.float32):
        raise ValueError(f"sinks must be float32 [{q.shape[1]}], not {sinks.dtype} {tuple(sinks.shape)}")


def _expect_on_device(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    """What the kernels need beyond what fits together."""
    heads, head_dim = q.shape[1:]
    if not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(f"q and pages must be of one type, not {q.dtype}, {k_pages.dtype} and {v_pages.dtype}")
    if heads // k_pages.shape[2] > cost.MAX_GROUP or head_dim > cost.MAX_HEAD_DIM:
        raise ValueError(
            f"{heads} heads of {head_dim} over {k_pages.shape[2]} kv heads are more than the device's "
            f"{cost.MAX_GROUP} of {cost.MAX_HEAD_DIM}"
        )
    _expect_contiguous(k_pages, v_pages)


def _expect_contiguous(k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("k and v pages must be contiguous")
