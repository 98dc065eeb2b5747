"""Attention in plain torch, in pieces of one shape that start at fixed positions: softmax as it goes along (Milakov and
Gimelshein, 1805.02867).

For a fixed order of sums. A row's bits depend on its own q and on the keys and values that it sees, not on what rows
are beside it or on how far those see: blocks of keys start at multiples of BLOCK_POSITIONS wherever a chunk starts, and
a block of which a row sees nothing multiplies its sums by 1 and adds 0.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

BLOCK_POSITIONS = 256
"""Keys at a time."""
BLOCK_PAIRS = 64
"""Pairs of row and query head over the same keys at a time, where one row has no more of them."""
SHIFTS = (1, 7)
"""By how many places rows are moved to see whether that changes them."""

Block = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""(first, end) -> keys [B, end - first, Dk] and values [B, end - first, Dv] float32 of these positions."""


class Rows(NamedTuple):
    """n rows at positions start and up, each of which sees the positions up to its own, the last `window` at most."""

    q: torch.Tensor  # [n, B, G, Dk]: G query heads for each of B key heads
    start: int
    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None  # [B, G] float32, logits that join the denominator and nothing else


def attended(rows: Rows, width: int, block: Block) -> torch.Tensor:
    """[n, B, G, Dv] float32, Dv being `width`."""
    count, key_heads, group, _ = rows.q.shape
    at_once = _rows_at_once(key_heads, group, rows.q.shape[3])
    tiles = [_Tile(rows, first, at_once, width) for first in range(0, count, at_once)]
    seen = 0 if rows.window is None else max(0, rows.start - rows.window + 1)
    for first in range(seen // BLOCK_POSITIONS * BLOCK_POSITIONS, rows.start + count, BLOCK_POSITIONS):
        end = min(first + BLOCK_POSITIONS, rows.start + count)
        keys, values = (_filled(part) for part in block(first, end))
        for tile in tiles:
            tile.take_in(first, keys, values)
    parts = [tile.result() for tile in tiles]
    return torch.cat(parts) if parts else rows.q.new_empty(0, key_heads, group, width, dtype=torch.float32)


class _Tile:
    """A fixed number of neighbouring rows, filled up with zeros, and what they have seen so far."""

    def __init__(self, rows: Rows, first: int, at_once: int, width: int) -> None:
        here = rows.q[first : first + at_once]
        self._count, key_heads, group, depth = here.shape
        self._rows = rows
        self._first_position = rows.start + first
        self._last_position = rows.start + first + self._count - 1
        filled = here.new_zeros(key_heads, at_once, group, depth, dtype=torch.float32)
        filled[:, : self._count] = here.transpose(0, 1)
        self._q = filled.flatten(1, 2)  # [B, M, Dk]
        self._position = (self._first_position + torch.arange(at_once)).repeat_interleave(group)[:, None]  # [M, 1]
        pairs = self._q.shape[:2]
        self._sums = torch.zeros(*pairs, width)
        self._total = torch.zeros(*pairs, 1)
        self._highest = torch.full((*pairs, 1), float("-inf"))

    def take_in(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys [B, BLOCK_POSITIONS, Dk] and values of the positions from `first`; nothing if no row sees them."""
        window = self._rows.window
        if first > self._last_position:
            return
        position = first + torch.arange(BLOCK_POSITIONS)
        visible = position <= self._position
        if window is not None:
            if first + BLOCK_POSITIONS <= self._first_position - window + 1:
                return
            visible &= position > self._position - window
        scores = self._rows.scale * torch.bmm(self._q, keys.mT)
        scores = scores.masked_fill_(~visible, float("-inf"))
        highest = torch.maximum(self._highest, scores.amax(dim=2, keepdim=True))
        base = highest.masked_fill(highest == float("-inf"), 0.0)  # of a row that has seen nothing yet
        weights, shrink = torch.exp(scores - base), torch.exp(self._highest - base)
        self._sums = self._sums * shrink + torch.bmm(weights, values)
        self._total = self._total * shrink + weights.sum(dim=2, keepdim=True)
        self._highest = highest

    def result(self) -> torch.Tensor:
        """[n, B, G, Dv]."""
        sums, total, sinks = self._sums, self._total, self._rows.sinks
        if sinks is not None:
            sink = sinks[:, None, :].expand(-1, sums.shape[1] // sinks.shape[1], -1).reshape(*sums.shape[:2], 1)
            base = torch.maximum(self._highest, sink)
            shrink = torch.exp(self._highest - base)
            sums, total = sums * shrink, total * shrink + torch.exp(sink - base)
        group = self._rows.q.shape[2]
        out = (sums / total).view(sums.shape[0], -1, group, sums.shape[2]).transpose(0, 1)[: self._count]
        return out + 0.0  # a sum of nothing but zeros may have either sign


def _filled(part: torch.Tensor) -> torch.Tensor:
    """[B, BLOCK_POSITIONS, D] in an allocation of its own, zeros behind what there is."""
    block = part.new_zeros(part.shape[0], BLOCK_POSITIONS, part.shape[2])
    block[:, : part.shape[1]] = part
    return block


@functools.cache
def _rows_at_once(key_heads: int, group: int, depth: int) -> int:
    """Rows of a tile: one, if in this machine's products a pair's bits depend on its place, which is tried."""
    rows = max(1, BLOCK_PAIRS // group)
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(key_heads, rows * group, depth, generator=generator)
    keys = torch.randn(key_heads, BLOCK_POSITIONS, depth, generator=generator)

    def products(q: torch.Tensor) -> Sequence[torch.Tensor]:
        scores = torch.bmm(q, keys.mT)
        return scores, torch.bmm(scores, keys)

    straight = products(q)
    for shift in SHIFTS:
        moved = products(q.roll(shift, 1))
        if not all(torch.equal(a, b.roll(shift, 1)) for a, b in zip(moved, straight, strict=True)):
            return 1
    return rows
