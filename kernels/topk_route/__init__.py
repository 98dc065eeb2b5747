"""Routing: which K experts each token goes to, and with what weight."""

import torch

from kernels.topk_route import ref


def topk_route(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over E in float32, then the k most likely experts of each token, most likely first.

    `logits` is [T, E], floating. Returns weights [T, K] float32 and experts [T, K] int32. Equal probabilities go to
    the lower expert. With `renormalise` each row of weights is divided by its sum. ValueError for wrong shapes or k.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be a floating [T, E] tensor, not {logits.dtype} {tuple(logits.shape)}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in 1..{logits.shape[1]} (the experts), not {k}")
    return ref.topk_route(logits, k, renormalise)
