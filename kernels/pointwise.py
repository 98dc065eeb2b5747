"""Functions of single numbers whose bits do not depend on where in a tensor a number stands. Plain torch.

On the host torch computes sigmoid, SiLU and softplus by vectors, and what is left at a tensor's or a thread's end one
by one, by another formula: so a row's bits depend on how many rows there are (found at widths that are no multiple of
32; torch 2.13, AVX-512, 2026-11). exp takes the end by vectors too, and sums and quotients round by themselves wherever
they stand. On a CUDA device each number is computed alike.
"""

import torch
from torch.nn import functional


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) in float32, of x's type."""
    if x.is_cuda:
        return torch.sigmoid(x)
    return (1.0 / (1.0 + torch.exp(-_contiguous_float32(x)))).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) in float32, of x's type."""
    if x.is_cuda:
        return functional.silu(x)
    wide = _contiguous_float32(x)
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def _contiguous_float32(x: torch.Tensor) -> torch.Tensor:
    """By vectors goes what is contiguous."""
    return x.to(torch.float32).contiguous()
