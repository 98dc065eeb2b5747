"""Plain torch."""

import torch


def topk_route(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    experts = torch.topk(_distinct_keys(probabilities), k, dim=-1).indices
    weights = torch.gather(probabilities, 1, experts)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts.to(torch.int32)


def topk_softmax(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.to(torch.float32) + 0.0  # which makes -0 a 0: they are equal
    experts = torch.topk(_distinct_keys(wide), k, dim=-1).indices
    return torch.softmax(torch.gather(wide, 1, experts), dim=-1), experts.to(torch.int32)


def _distinct_keys(values: torch.Tensor) -> torch.Tensor:
    """[T, E] int64 keys in the order of the float32 values, ties broken towards the lower expert.

    The bits of a float32 that is not negative order like the float, those of a negative one the other way; torch.topk
    itself promises nothing about ties.
    """
    experts = values.shape[1]
    lower_first = torch.arange(experts - 1, -1, -1, device=values.device)
    bits = values.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(torch.int64) << 32) | lower_first
