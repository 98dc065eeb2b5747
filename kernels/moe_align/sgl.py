# mypy: allow-untyped-calls
"""sgl_kernel's alignment, brought into our order."""

from importlib import import_module

import torch

MOST_EXPERTS = 1023
"""Of one call: with more it reads out of bounds (seen on an H200 with sglang-kernel 0.4.5: 1,024 end the context)."""


def moe_align(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.moe_align.moe_align`. ValueError if sgl_kernel cannot be imported or takes fewer experts."""
    routes = by_expert(experts, num_experts)
    count = max(1, experts.numel())
    keys = experts.reshape(-1)[routes].to(torch.int64) * count + routes
    ordered = keys.sort().values  # within an expert they came in the order in which the device's threads were served
    bins = torch.arange(num_experts + 1, device=experts.device) * count
    return (ordered % count).to(torch.int32), torch.searchsorted(ordered, bins, out_int32=True)


def by_expert(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T * K] int32: the routes, by expert, in no particular order within one. Raises as `moe_align`."""
    if num_experts > MOST_EXPERTS:
        raise ValueError(f"num_experts must be at most {MOST_EXPERTS} for sgl_kernel, not {num_experts}")
    try:
        align = import_module("sgl_kernel").moe_align_block_size
    except ImportError as error:  # not installed, or built for another torch
        raise ValueError(f"sgl_kernel cannot be used: {error}") from error
    count, device = experts.numel(), experts.device
    routes, block_experts = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    total = torch.empty(1, dtype=torch.int32, device=device)
    cumulated = torch.empty(num_experts + 2, dtype=torch.int32, device=device)
    if count:  # it counts an expert more, for routes to none; in blocks of one row nothing is padded
        align(experts.contiguous(), num_experts + 1, 1, routes, block_experts, total, cumulated)
    return routes
