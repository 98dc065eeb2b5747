"""Plain torch."""

import torch


def moe_align(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = experts.reshape(-1)
    routes = torch.sort(flat, stable=True).indices.to(torch.int32)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    offsets[1:] = torch.bincount(flat, minlength=num_experts).cumsum(0)
    return routes, offsets
