"""Plain torch."""

import torch


def topk_route(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    experts = torch.topk(_distinct_keys(probabilities), k, dim=-1).indices
    weights = torch.gather(probabilities, 1, experts)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts.to(torch.int32)


def _distinct_keys(probabilities: torch.Tensor) -> torch.Tensor:
    """[T, E] int64 keys in the order of the probabilities, ties broken towards the lower expert.

    The bits of a float32 that is not negative order like the float; torch.topk itself promises nothing about ties.
    """
    experts = probabilities.shape[1]
    lower_first = torch.arange(experts - 1, -1, -1, device=probabilities.device)
    return (probabilities.view(torch.int32).to(torch.int64) << 32) | lower_first
