"""The sums in plain torch."""

import torch
from torch import Tensor


def slot_sums(pool: Tensor, slots: Tensor, within: Tensor, blocks: Tensor) -> Tensor:
    """See `kernels.checksum.slot_sums`."""
    words = pool.view(torch.int32)
    weights = (blocks[:, None] * within).flatten()[: words.shape[1]]
    sums = torch.zeros(slots.shape[0], dtype=torch.int64, device=pool.device)
    used = slots >= 0
    sums[used] = (words[slots[used].long()].long() * weights).sum(1)
    return sums


def damaged(expected: Tensor, sums: Tensor, slot_of: Tensor, span: Tensor, offsets: Tensor) -> Tensor:
    """[E] bool: the experts of one layer that `kernels.checksum.check_records` notes; `expected` and `sums` [E]."""
    expert = torch.arange(expected.shape[0], device=expected.device)
    used = (slot_of >= 0) & (offsets.diff() > 0) & (expert >= span[0]) & (expert < span[1])
    return used & (sums != expected)
