# mypy: allow-untyped-calls
"""Routings with a given number of distinct experts: uniform, or by Zipf's law over the experts in a random order."""

import torch

TRIES = 300


def chosen(
    tokens: int, k: int, experts: int, seed: int, zipf: float = 0.0, distinct: int | None = None
) -> torch.Tensor:
    """[T, K] int32: each token's K different experts, drawn without replacement with weights rank^-zipf.

    Of TRIES draws the one whose number of distinct experts is nearest to `distinct`, or the first.
    """
    generator = torch.Generator().manual_seed(seed)
    best, nearest = torch.empty(0), experts + 1
    for _ in range(TRIES if distinct else 1):
        drawn = _draw(tokens, k, experts, zipf, generator)
        off = abs(int(drawn.unique().numel()) - (distinct or 0))
        if off < nearest:
            best, nearest = drawn, off
        if off == 0:
            break
    return best


def _draw(tokens: int, k: int, experts: int, zipf: float, generator: torch.Generator) -> torch.Tensor:
    """The top K of log weight + Gumbel noise are a draw without replacement."""
    order = torch.randperm(experts, generator=generator)
    log_weights = -zipf * torch.log1p(torch.arange(experts))[order]
    noise = -torch.log(torch.empty(tokens, experts).exponential_(generator=generator))
    return (log_weights + noise).topk(k, dim=1).indices.to(torch.int32)
