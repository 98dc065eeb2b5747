"""Plain torch: routing by sigmoids among groups of experts."""

import torch

from kernels import pointwise
from kernels.topk_route.ref import distinct_keys


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
    scores = (pointwise.sigmoid if fixed else torch.sigmoid)(logits.to(torch.float32))
    choice = scores + bias
    allowed = _allowed(choice, groups, groups_per_token)
    keys = distinct_keys(choice).masked_fill(~allowed, torch.iinfo(torch.int64).min)
    experts = torch.topk(keys, k, dim=-1).indices
    weights = torch.gather(scores, 1, experts)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, experts.to(torch.int32)


def _allowed(choice: torch.Tensor, groups: int, groups_per_token: int) -> torch.Tensor:
    """[T, E] bool: the experts of the groups whose two largest values add up to most."""
    tokens, experts = choice.shape
    if groups_per_token == groups:
        return torch.ones_like(choice, dtype=torch.bool)
    sums = torch.topk(choice.view(tokens, groups, experts // groups), 2, dim=-1).values.sum(dim=-1)
    best = torch.topk(distinct_keys(sums), groups_per_token, dim=-1).indices
    of_groups = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, True)
    return of_groups.repeat_interleave(experts // groups, dim=1)
