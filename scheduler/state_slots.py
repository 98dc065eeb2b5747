"""Which slot of the worker has which recurrent state. Pure.

A model with recurrent layers keeps, beside the KV of each token, one state for all tokens so far. Every slot is free,
some running request's own, being written by the step that is out, or a *snapshot*: the state behind the first tokens of
some prompt or answer, from which a later request that begins with them can go on. Unlike KV, the state behind a shorter
prefix cannot be had from that behind a longer one: without a snapshot at its end a cached prefix is of no use.

A request that is about to start from a snapshot *pins* it until the step that copies it is back. Any other snapshot may
be given up for its slot, the one that was least recently written or started from first.
"""

from collections import OrderedDict


class Snapshot:
    """A state that is kept. `slot` is -1 once it is gone."""

    __slots__ = ("pins", "position", "slot", "unwanted")

    def __init__(self, slot: int, position: int) -> None:
        self.slot = slot
        self.position = position  # tokens that are in it
        self.pins = 0
        self.unwanted = False  # it goes with its last pin

    @property
    def usable(self) -> bool:
        """Whether a request may start from it."""
        return self.slot >= 0 and not self.unwanted


class StateSlots:
    """Slots 0 .. total - 1, and the snapshots in them. With `total` 0 the model has no recurrent state."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.snapshots = 0
        self._free = list(range(total - 1, -1, -1))
        self._unpinned: OrderedDict[Snapshot, None] = OrderedDict()  # least recently used first

    @property
    def free(self) -> int:
        """Slots with nothing in them."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Slots that can be had: free ones, and snapshots that are not pinned."""
        return len(self._free) + len(self._unpinned)

    def take(self) -> int | None:
        """A slot, if need be that of a snapshot, which is gone then; None if none can be had."""
        if not self._free and self._unpinned:
            self.forget(next(iter(self._unpinned)))
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """A slot that was taken is free again."""
        assert 0 <= slot < self.total and slot not in self._free
        self._free.append(slot)

    def keep(self, slot: int, position: int) -> Snapshot:
        """A slot that was taken has the state behind `position` tokens."""
        snapshot = Snapshot(slot, position)
        self.snapshots += 1
        self._unpinned[snapshot] = None
        return snapshot

    def pin(self, snapshot: Snapshot) -> None:
        """A request is to start from `snapshot`, which must be usable."""
        assert snapshot.usable
        self._unpinned.pop(snapshot, None)
        snapshot.pins += 1

    def unpin(self, snapshot: Snapshot) -> None:
        """The request has started from it, or will not."""
        snapshot.pins -= 1
        if snapshot.pins:
            return
        self._unpinned[snapshot] = None
        if snapshot.unwanted:
            self.forget(snapshot)

    def take_over(self, snapshot: Snapshot) -> int:
        """The slot of `snapshot`, which only the caller has pinned: its state goes on as the caller's own."""
        assert snapshot.pins == 1
        slot, snapshot.slot = snapshot.slot, -1
        self.snapshots -= 1
        return slot

    def forget(self, snapshot: Snapshot) -> None:
        """No further request starts from it; its slot is free now, or when no request has it pinned any more.

        No-op for one that is gone.
        """
        snapshot.unwanted = True
        if snapshot.slot >= 0 and not snapshot.pins:
            del self._unpinned[snapshot]
            self._free.append(snapshot.slot)
            snapshot.slot = -1
            self.snapshots -= 1
