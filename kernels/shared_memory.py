"""How much shared memory a program may have: by it tiles are chosen, so that kernels can be launched on every GPU."""

import functools

import torch

H200_NBYTES = 227 * 1024
"""What a program may have on an H200: tiles of the interpreter are that GPU's."""


@functools.cache
def shared_nbytes(device: torch.device) -> int:
    """What a program may have at most on the device; of one that runs no programs, an H200's.

    163 KiB on an A100, 99 KiB on GeForce RTX 3090, 4090 and 5090.
    """
    if device.type != "cuda":
        return H200_NBYTES
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
