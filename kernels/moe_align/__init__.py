"""Alignment: the routes of a step sorted by expert, and cut into blocks of one expert each."""

from typing import NamedTuple

import torch

from kernels.moe_align import ref
from kernels.moe_align.cost import DEFAULT, Backend

MAX_EXPERTS_ON_DEVICE = 4096
"""E: one program counts all of them at once."""


class Alignment(NamedTuple):
    """Routes sorted by expert. Route `t * K + k` is token t's k-th expert.

    `routes[offsets[e]:offsets[e + 1]]` are the routes to expert e, ascending.
    """

    routes: torch.Tensor  # [T * K] int32
    offsets: torch.Tensor  # [E + 1] int32


class Blocks(NamedTuple):
    """Sorted routes in blocks of at most `block_rows`, each of one expert; the tables are longer than they are full.

    Block b has the routes `routes[first[b]:first[b] + rows[b]]`, all to expert `expert[b]`; expert e has the blocks
    `starts[e]` up to `starts[e + 1]`. What lies past `starts[E]` is not set.
    """

    routes: torch.Tensor  # [T * K] int32
    starts: torch.Tensor  # [E + 1] int32
    expert: torch.Tensor  # [max_blocks(...)] int32
    first: torch.Tensor  # [max_blocks(...)] int32
    rows: torch.Tensor  # [max_blocks(...)] int32
    block_rows: int


def moe_align(experts: torch.Tensor, num_experts: int, backend: Backend = DEFAULT) -> Alignment:
    """Sorts routes by expert, E bins, whatever slots the experts are in.

    `experts` is [T, K] int32 with values in 0..num_experts-1 (not checked: that would wait for the device). `backend`
    is who does it on a CUDA device; the result is the same. ValueError for a wrong shape, type or num_experts, which on
    a CUDA device ends at 4,096, with sgl_kernel at 1,023; and for sgl_kernel where it cannot be imported.
    """
    _check(experts, num_experts)
    if not experts.is_cuda:
        return Alignment(*ref.moe_align(experts, num_experts))
    if backend == "sgl_kernel":
        from kernels.moe_align import sgl

        return Alignment(*sgl.moe_align(experts, num_experts))
    from kernels.moe_align import tri

    return Alignment(*tri.moe_align(experts, num_experts))


def align_in_blocks(experts: torch.Tensor, num_experts: int, block_rows: int) -> tuple[Alignment, Blocks]:
    """`moe_align`, and `blocks` of it: on a CUDA device, of at most 1,024 routes, in one launch.

    ValueError for what either refuses.
    """
    _check(experts, num_experts)
    if not experts.is_cuda:
        alignment = moe_align(experts, num_experts)
        return alignment, blocks(alignment, block_rows)
    bound = max_blocks(experts.numel(), num_experts, block_rows)
    from kernels.moe_align import tri

    (routes, offsets), table = tri.align_in_blocks(experts, num_experts, block_rows, bound)
    return Alignment(routes, offsets), Blocks(routes, *table, block_rows)


def _check(experts: torch.Tensor, num_experts: int) -> None:
    if experts.ndim != 2 or experts.dtype != torch.int32:
        raise ValueError(f"experts must be a [T, K] int32 tensor, not {experts.dtype} {tuple(experts.shape)}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, not {num_experts}")
    if experts.is_cuda and num_experts > MAX_EXPERTS_ON_DEVICE:
        raise ValueError(f"num_experts must be at most {MAX_EXPERTS_ON_DEVICE} on a device, not {num_experts}")


def max_blocks(routes: int, num_experts: int, block_rows: int) -> int:
    """No routing of `routes` routes to `num_experts` experts has more blocks: each expert has one that is not full.

    ValueError if `block_rows` is below 1.
    """
    if block_rows < 1:
        raise ValueError(f"block_rows must be at least 1, not {block_rows}")
    return (routes + min(routes, num_experts) * (block_rows - 1)) // block_rows


def blocks(alignment: Alignment, block_rows: int) -> Blocks:
    """Cuts each expert's routes into blocks of `block_rows`; on a CUDA device without waiting for it.

    ValueError if `block_rows` is below 1.
    """
    bound = max_blocks(alignment.routes.shape[0], alignment.offsets.shape[0] - 1, block_rows)
    if not alignment.offsets.is_cuda:
        return Blocks(alignment.routes, *ref.blocks(alignment.offsets, block_rows, bound), block_rows)
    from kernels.moe_align import tri

    return Blocks(alignment.routes, *tri.blocks(alignment.offsets, block_rows, bound), block_rows)
