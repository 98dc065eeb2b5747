"""Routing: which K experts each token goes to, and with what weight."""

import torch

from kernels.topk_route import ref

MAX_EXPERTS_ON_DEVICE = 4096
MAX_K_ON_DEVICE = 32


def topk_route(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over E in float32, then the k most likely experts of each token, most likely first.

    `logits` is [T, E], floating. Returns weights [T, K] float32 and experts [T, K] int32. Equal probabilities go to
    the lower expert. With `renormalise` each row of weights is divided by its sum. On a CUDA device it is one launch, E
    ends at 4,096 and K at 32, and logits that are not numbers still give K different experts. ValueError for wrong
    shapes, k or E.
    """
    _check(logits, k)
    if not logits.is_cuda:
        return ref.topk_route(logits, k, renormalise)
    from kernels.topk_route import tri

    return tri.topk_route(logits, k, renormalise)


def topk_softmax(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each token's largest logits, the largest first, weighted by a softmax over these k in float32.

    Otherwise as `topk_route`; equal logits go to the lower expert. Source: transformers' GptOssTopKRouter, which rounds
    the weights to the logits' type.
    """
    _check(logits, k)
    if not logits.is_cuda:
        return ref.topk_softmax(logits, k)
    from kernels.topk_route import tri

    return tri.topk_softmax(logits, k)


def _check(logits: torch.Tensor, k: int) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be a floating [T, E] tensor, not {logits.dtype} {tuple(logits.shape)}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in 1..{logits.shape[1]} (the experts), not {k}")
    if logits.is_cuda and (logits.shape[1] > MAX_EXPERTS_ON_DEVICE or k > MAX_K_ON_DEVICE):
        raise ValueError(
            f"k must be at most {MAX_K_ON_DEVICE} of {MAX_EXPERTS_ON_DEVICE} experts on a device, "
            f"not {k} of {logits.shape[1]}"
        )
