"""Products with a weight whose every row has the bits that it has alone: for models that are to be deterministic.

What multiplies matrices otherwise (MKL, oneDNN, cuBLAS) chooses by the number of rows how it adds, so that a row's
last bits depend on what else is in its step. Here what is multiplied at once has the same shape for any number of rows.
"""

import torch

from kernels.linear import ref

__all__ = ["heads_linear", "linear", "rows_at_once"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    """x W^T + bias: [T, N] of x [T, K], `weight` [N, K], `bias` [N] or None, all of one type; sums are float32.

    A row's bits depend on that row and the weight alone. On the host `rows` are multiplied at a time, which
    `rows_at_once` must have given for the weight; on a CUDA device it is one launch, and `rows` is not read. ValueError
    for shapes or types that do not fit together.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(f"x {_kind(x)} does not fit the weight {_kind(weight)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(f"bias {_kind(bias)} does not fit the weight {_kind(weight)}")
    if not x.is_cuda:
        return ref.linear(x, weight, bias, rows)
    from kernels.linear import tri

    return tri.linear(x, weight, bias)


def heads_linear(x: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Each head of x [T, heads, A] times its own matrix of `weight` [heads, A, B]: [T, heads, B]; else as `linear`."""
    if x.ndim != 3 or weight.ndim != 3 or x.shape[1:] != weight.shape[:2] or x.dtype != weight.dtype:
        raise ValueError(f"x {_kind(x)} does not fit the weight {_kind(weight)}")
    if not x.is_cuda:
        return ref.heads_linear(x, weight, rows)
    from kernels.linear import tri

    return tri.heads_linear(x, weight)


def rows_at_once(weight: torch.Tensor, bias: torch.Tensor | None = None) -> int:
    """How many rows at a time the host multiplies with `weight`, of `linear` or of `heads_linear`.

    As many as make the weight worth reading, if this machine's libraries then give a row the same bits in any place and
    beside any others, which is tried; otherwise one. On a CUDA device it means nothing.
    """
    return 1 if weight.is_cuda or not ref.places_are_alike(weight, bias) else ref.ROWS


def _kind(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"
