"""Alignment: the routes of a step sorted by expert."""

from typing import NamedTuple

import torch

from kernels.moe_align import ref


class Alignment(NamedTuple):
    """Routes sorted by expert. Route `t * K + k` is token t's k-th expert.

    `routes[offsets[e]:offsets[e + 1]]` are the routes to expert e, ascending.
    """

    routes: torch.Tensor  # [T * K] int32
    offsets: torch.Tensor  # [E + 1] int32


def moe_align(experts: torch.Tensor, num_experts: int) -> Alignment:
    """Sorts routes by expert, E bins, whatever slots the experts are in.

    `experts` is [T, K] int32 with values in 0..num_experts-1 (not checked: that would wait for the device).
    ValueError for a wrong shape, type or num_experts.
    """
    if experts.ndim != 2 or experts.dtype != torch.int32:
        raise ValueError(f"experts must be a [T, K] int32 tensor, not {experts.dtype} {tuple(experts.shape)}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, not {num_experts}")
    return Alignment(*ref.moe_align(experts, num_experts))
