"""Plain torch."""

import torch


def topk_route(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    experts = torch.topk(distinct_keys(probabilities), k, dim=-1).indices
    weights = torch.gather(probabilities, 1, experts)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts.to(torch.int32)


def topk_softmax(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.to(torch.float32)
    experts = torch.topk(distinct_keys(wide), k, dim=-1).indices
    return torch.softmax(torch.gather(wide, 1, experts), dim=-1), experts.to(torch.int32)


def distinct_keys(values: torch.Tensor) -> torch.Tensor:
    """[T, N] int64 keys in the order of float32 `values`, none lowest, equals broken towards the lower column.

    A float's bits order like it once those of a negative one, but for its sign, are turned over; -0 is made 0 before.
    torch.topk itself promises nothing about ties.
    """
    bits = (values + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    columns = values.shape[1]
    return (ordered << 32) | torch.arange(columns - 1, -1, -1, device=values.device)
