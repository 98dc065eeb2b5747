"""Causal attention over the latents of multi-head latent attention, in their KV pages, and storing them there.

The absorbed form (DeepSeek-V2, 2405.04434, appendix C): what makes keys of latents is multiplied into q beforehand, and
what makes values of them onto the result afterwards, so that all heads attend over one latent per token.
"""

import torch

from kernels.latent_attention import cost, fixed_ref, ref


def latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    pages: torch.Tensor,
    start: int,
    scale: float,
    fixed: bool = False,
) -> torch.Tensor:
    """softmax(scale * (q c^T + q_rope r^T)) c of the tokens at positions start .. start + n - 1, each over positions up
    to its own, with latents c and rotated key parts r of those positions.

    `q` is [n, heads, R], `q_rope` [n, heads, P], views of something wider if need be; `latent_pages` [num_pages,
    page_tokens, 1, R] and `rope_pages` [num_pages, page_tokens, 1, P] hold the new tokens too; `pages` [X] int64 are
    the pages of positions 0 .. start + n - 1, in order (further pages are not read). Sums are float32. Returns
    [n, heads, R], contiguous. If it is `fixed`, a row's bits are those of `decode_latent_attention` that is fixed, and
    depend neither on the chunk's other rows nor on where it starts. On a CUDA device nothing waits for it, R ends at
    512 and P at 64. ValueError for shapes or types that do not fit together.
    """
    _expect(q, q_rope, latent_pages, rope_pages)
    rows, page_tokens = q.shape[0], latent_pages.shape[1]
    if pages.ndim != 1 or start < 0 or start + rows > pages.shape[0] * page_tokens:
        raise ValueError(f"positions {start} .. {start + rows - 1} do not fit {tuple(pages.shape)} pages")
    arguments = (q, q_rope, latent_pages, rope_pages, pages, start, scale)
    if not q.is_cuda:
        return fixed_ref.latent_attention(*arguments) if fixed else ref.latent_attention(*arguments)
    _expect_on_device(q, latent_pages, rope_pages)
    if fixed:
        from kernels.latent_attention import fixed_tri

        return fixed_tri.latent_attention(*arguments)
    from kernels.latent_attention import tri

    return tri.latent_attention(*arguments)


def decode_latent_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    fixed: bool = False,
) -> torch.Tensor:
    """`latent_attention` of one new token of each of B sequences: row b over the positions 0 .. lengths[b] - 1.

    `q` is [B, heads, R], `q_rope` [B, heads, P]; `table` [B, X] int32, of whose row b the first ceil(lengths[b] /
    page_tokens) pages are read, in order; `lengths` [B] int32 count the new token, and a row of length 0 gives zeros.
    Returns [B, heads, R]. A row depends on its own sequence only: not on B, not on X; `fixed` as for
    `latent_attention`. On a CUDA device nothing waits for it, the launches do not depend on the lengths, and values in
    tensors are not checked. ValueError for shapes or types that do not fit together.
    """
    _expect(q, q_rope, latent_pages, rope_pages)
    rows = q.shape[0]
    if table.ndim != 2 or table.shape[0] != rows or table.dtype != torch.int32:
        raise ValueError(f"table must be an int32 [{rows}, X] tensor, not {table.dtype} {tuple(table.shape)}")
    if tuple(lengths.shape) != (rows,) or lengths.dtype != torch.int32:
        raise ValueError(f"lengths must be an int32 [{rows}] tensor, not {lengths.dtype} {tuple(lengths.shape)}")
    arguments = (q, q_rope, latent_pages, rope_pages, table, lengths, scale)
    if not q.is_cuda:
        return fixed_ref.decode_latent_attention(*arguments) if fixed else ref.decode_latent_attention(*arguments)
    _expect_on_device(q, latent_pages, rope_pages)
    if fixed:
        from kernels.latent_attention import fixed_tri

        return fixed_tri.decode_latent_attention(*arguments)
    from kernels.latent_attention import tri

    return tri.decode_latent_attention(*arguments)


def store_latent(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Row i of `latent` [T, 1, R] and of `rope_key` [T, 1, P] goes to page `pages[i]` at place `offsets[i]` ([T] int64
    each).

    Pages as for `latent_attention`. On a CUDA device it is one launch, and values in tensors are not checked.
    ValueError for shapes or types that do not fit together.
    """
    for what, rows, kept in (("latent", latent, latent_pages), ("rope_key", rope_key, rope_pages)):
        if rows.ndim != 3 or kept.ndim != 4 or rows.shape[1:] != kept.shape[2:] or rows.shape[1] != 1:
            raise ValueError(f"{what} {tuple(rows.shape)} does not fit pages {tuple(kept.shape)}")
        if rows.dtype != kept.dtype or rows.shape[0] != latent.shape[0] or kept.shape[:2] != latent_pages.shape[:2]:
            raise ValueError(f"{what} {rows.dtype} {tuple(rows.shape)} does not fit {kept.dtype} {tuple(kept.shape)}")
    for name, places in (("pages", pages), ("offsets", offsets)):
        if tuple(places.shape) != latent.shape[:1] or places.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 [{latent.shape[0]}], not {places.dtype} {tuple(places.shape)}")
    if not latent.is_cuda:
        ref.store_latent(latent, rope_key, latent_pages, rope_pages, pages, offsets)
        return
    _expect_contiguous(latent_pages, rope_pages)
    from kernels.latent_attention import tri

    tri.store_latent(latent, rope_key, latent_pages, rope_pages, pages, offsets)


def _expect(q: torch.Tensor, q_rope: torch.Tensor, latent_pages: torch.Tensor, rope_pages: torch.Tensor) -> None:
    fits = q.ndim == q_rope.ndim == 3 and latent_pages.ndim == rope_pages.ndim == 4
    fits = fits and q.shape[:2] == q_rope.shape[:2] and latent_pages.shape[:3] == rope_pages.shape[:3]
    fits = fits and latent_pages.shape[2:] == (1, q.shape[2]) and rope_pages.shape[3] == q_rope.shape[2]
    if not fits:
        raise ValueError(
            f"expected q [n, heads, R], q_rope [n, heads, P] and pages [num_pages, page_tokens, 1, R] and [.., P], "
            f"not {tuple(q.shape)}, {tuple(q_rope.shape)}, {tuple(latent_pages.shape)}, {tuple(rope_pages.shape)}"
        )
    if not q.dtype == q_rope.dtype == latent_pages.dtype == rope_pages.dtype:
        kinds = (q.dtype, q_rope.dtype, latent_pages.dtype, rope_pages.dtype)
        raise ValueError(f"q, q_rope and pages must be of one type, not {kinds}")


def _expect_on_device(q: torch.Tensor, latent_pages: torch.Tensor, rope_pages: torch.Tensor) -> None:
    """What the kernels need beyond what fits together."""
    if latent_pages.shape[3] > cost.MAX_RANK or rope_pages.shape[3] > cost.MAX_ROPE:
        raise ValueError(
            f"latents of {latent_pages.shape[3]} + {rope_pages.shape[3]} are more than the device's "
            f"{cost.MAX_RANK} + {cost.MAX_ROPE}"
        )
    _expect_contiguous(latent_pages, rope_pages)


def _expect_contiguous(latent_pages: torch.Tensor, rope_pages: torch.Tensor) -> None:
    if not (latent_pages.is_contiguous() and rope_pages.is_contiguous()):
        raise ValueError("pages must be contiguous")
