"""Routing: which K experts each token goes to, and with what weight."""

import torch

from kernels.topk_route import grouped_ref, ref

MAX_EXPERTS_ON_DEVICE = 4096
"""E: one program holds a row of logits."""

MAX_K_ON_DEVICE = 32
"""K: the likeliest are found one after the other."""


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


def grouped_route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    groups: int,
    groups_per_token: int,
    renormalise: bool,
    scale: float,
    fixed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoids in float32, then the k experts of the largest sigmoid + bias among those of the best groups.

    `logits` is [T, E], floating; `bias` [E] float32. The experts stand in `groups` equal runs; a group is as good as
    the sum of its two largest sums, and `groups_per_token` of them are kept. Returns weights [T, K] float32, which are
    the sigmoids without bias, with `renormalise` over their sum (+ 1e-20), times `scale`; and experts [T, K] int32, the
    largest sum first. Equals, of experts and of groups, go to the lower one. Source: transformers'
    DeepseekV3TopkRouter. If it is `fixed`, a row's bits depend on that row alone, as on a CUDA device they always do,
    where it is one launch, with the limits of `topk_route`. ValueError for wrong
    shapes or counts.
    """
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be a floating [T, E] tensor, not {logits.dtype} {tuple(logits.shape)}")
    experts = logits.shape[1]
    if tuple(bias.shape) != (experts,) or bias.dtype != torch.float32:
        raise ValueError(f"bias must be float32 [{experts}], not {bias.dtype} {tuple(bias.shape)}")
    if not 1 <= groups_per_token <= groups or experts % groups or (groups > groups_per_token and experts < 2 * groups):
        raise ValueError(f"{groups_per_token} of {groups} groups do not fit {experts} experts, two in each at least")
    if not 1 <= k <= experts // groups * groups_per_token:
        raise ValueError(f"k must be in 1..{experts // groups * groups_per_token} (the groups' experts), not {k}")
    arguments = (k, groups, groups_per_token, renormalise, scale)
    if not logits.is_cuda:
        return grouped_ref.grouped_route(logits, bias, *arguments, fixed)
    if experts > MAX_EXPERTS_ON_DEVICE or k > MAX_K_ON_DEVICE:
        raise ValueError(
            f"k must be at most {MAX_K_ON_DEVICE} of {MAX_EXPERTS_ON_DEVICE} experts on a device, not {k} of {experts}"
        )
    from kernels.topk_route import grouped_tri

    return grouped_tri.grouped_route(logits, bias, *arguments)
