"""Host memory that the device reads and writes where it lies: --kv-placement and --token-embedding-placement."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from copyengine.device import Bytes


class HostMemory(NamedTuple):
    """The same zeroed bytes, [nbytes] uint8, as the device and as the processor see them."""

    tensor: torch.Tensor
    array: Bytes


Allocate = Callable[[int], HostMemory]
"""So many bytes. ConfigError if they cannot be had."""

Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""A tensor of zeros of this shape and type."""


def zeros_in(allocate: Allocate) -> Zeros:
    """What makes tensors on the device that lie in host memory."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return allocate(math.prod(shape) * dtype.itemsize).tensor.view(dtype).view(shape)

    return zeros


def copy_in(allocate: Allocate, source: torch.Tensor) -> torch.Tensor:
    """`source`, which is on the host, as a tensor on the device that lies in host memory: copied by the processor."""
    memory = allocate(source.nbytes)
    memory.array[:] = source.contiguous().view(-1).view(torch.uint8).numpy()
    return memory.tensor.view(source.dtype).view(source.shape)
