"""Waiting on the device for a flag, where the device has no stream waits: a kernel of one warp that spins."""

import torch
from torch import Tensor


def spin_until_set(flags: Tensor, index: int) -> None:
    """Hold up the current stream until word `index` of `flags` [F] int32, on a CUDA device, is not 0.

    May be captured in a graph. There is no time limit: whoever gives up on the word's writer writes the word instead.
    ValueError for flags that are not [F] int32 on a CUDA device, or an index that they do not have.
    """
    if flags.dtype != torch.int32 or flags.ndim != 1 or not flags.is_contiguous() or not flags.is_cuda:
        raise ValueError(
            f"flags must be contiguous [F] int32 on a CUDA device, not {flags.dtype} {tuple(flags.shape)} "
            f"on {flags.device}"
        )
    if not 0 <= index < flags.shape[0]:
        raise ValueError(f"flag {index} of {flags.shape[0]}")
    from kernels.flag_wait import tri

    tri.spin_until_set(flags, index)
