"""Whether slots hold the records that they should: the sums of what is in them against those of the banks.

What is summed, and why it tells, copyengine.checksums says; `Weights` of there are `within` and `blocks` here.
`check_records` is launched in the stream of a step, behind the wait for a query's copies and before the GEMM over its
experts, and waits for nobody: what it finds is noted in words that the host reads when the step is over.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DAMAGE = ("records", "first")
"""Words of `RecordChecks.damage`."""

MOST_SPLITS = 16
"""Programs that sum one record at most: a decode step's few records are so read by more than one program each."""


@dataclass(frozen=True)
class RecordChecks:
    """What the records of each layer sum to, and what was found; all on one device. One launch at a time uses it."""

    expected: Tensor  # [L, E] int64
    within: Tensor  # [B] int64, what the words of a block are multiplied by; B a power of two
    blocks: Tensor  # [blocks of a record] int64, and what its blocks are
    partial: Tensor  # [E, splits] int64, scratch
    damage: Tensor  # [2] int64: how many records were not what they should be, and layer * E + expert of the first one

    @property
    def splits(self) -> int:
        """Programs that sum one record."""
        return self.partial.shape[1]


def new_record_checks(expected: Tensor, within: Tensor, blocks: Tensor, device: torch.device) -> RecordChecks:
    """Buffers on `device`, nothing found yet. `expected` [L, E], `within` [B] and `blocks`, all int64, on the host.

    ValueError if B is no power of two.
    """
    block = within.shape[0]
    if block < 1 or block & (block - 1):
        raise ValueError(f"blocks of {block} words: must be a power of two")
    splits = min(MOST_SPLITS, blocks.shape[0])
    return RecordChecks(
        expected.to(device),
        within.to(device),
        blocks.to(device),
        partial=torch.zeros(expected.shape[1], splits, dtype=torch.int64, device=device),
        damage=torch.zeros(len(DAMAGE), dtype=torch.int64, device=device),
    )


def check_records(
    checks: RecordChecks, layer: int, pool: Tensor, slot_of: Tensor, span: Tensor, offsets: Tensor, reach: int
) -> None:
    """Note in `checks.damage` which of the records that a GEMM is about to read are not what they should be.

    Those are of the experts e with a slot in `slot_of` [E] int32, offsets[e + 1] > offsets[e] in `offsets` [E + 1]
    int32, and span[0] <= e < span[1] for `span` [2] int32, at most `reach` of them wide; `pool` is [P, record_nbytes]
    uint8. May be captured in a graph. ValueError for a layer that there is not, or a pool of other records.
    """
    layers, experts = checks.expected.shape
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} of {layers}")
    _check_pool(checks, pool)
    if slot_of.shape != (experts,) or offsets.shape != (experts + 1,) or not slot_of.is_contiguous():
        raise ValueError(f"{tuple(slot_of.shape)} slots and {tuple(offsets.shape)} offsets of {experts} experts")
    from kernels.checksum import tri

    tri.check_records(checks, layer, pool, slot_of, span, offsets, min(reach, experts))


def slot_sums(checks: RecordChecks, pool: Tensor, slots: Tensor) -> Tensor:
    """[n] int64: the sums of what is in `slots` [n] int32 of `pool` [P, record_nbytes] uint8; 0 for a slot below 0.

    ValueError for a pool of other records.
    """
    _check_pool(checks, pool)
    if slots.ndim != 1 or slots.dtype != torch.int32 or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous [n] int32, not {slots.dtype} {tuple(slots.shape)}")
    from kernels.checksum import tri

    return tri.slot_sums(checks, pool, slots)


def _check_pool(checks: RecordChecks, pool: Tensor) -> None:
    words, block = pool.shape[1] // 4, checks.within.shape[0]
    if pool.dtype != torch.uint8 or not pool.is_contiguous() or pool.shape[1] % 16:
        raise ValueError(f"a pool must be contiguous [P, 16 n] uint8, not {pool.dtype} {tuple(pool.shape)}")
    if -(-words // block) != checks.blocks.shape[0]:
        raise ValueError(f"records of {words} words where {checks.blocks.shape[0]} blocks of {block} are summed")
