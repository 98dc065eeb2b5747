"""State slots against a model that remembers what is in each and when it was last used."""

from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from scheduler.state_slots import Snapshot, StateSlots

TOTAL = 5


class Entry:
    """What the model knows of one snapshot."""

    def __init__(self, slot: int, used: int) -> None:
        self.slot = slot
        self.used = used
        self.pins = 0
        self.unwanted = False


class Keeping(RuleBasedStateMachine):
    taken = Bundle("taken")
    snapshots = Bundle("snapshots")
    pinned = Bundle("pinned")

    def __init__(self) -> None:
        super().__init__()
        self.slots = StateSlots(TOTAL)
        self.out: set[int] = set()
        self.kept: dict[Snapshot, Entry] = {}
        self.time = 0

    def used(self) -> int:
        self.time += 1
        return self.time

    @rule(target=taken)
    def take(self) -> object:
        """A free one, or else that of the snapshot which was used least recently and is not pinned."""
        free = set(range(TOTAL)) - self.out - {entry.slot for entry in self.kept.values()}
        victim = min((s for s in self.kept if not self.kept[s].pins), key=lambda s: self.kept[s].used, default=None)
        slot = self.slots.take()
        if free:
            assert slot in free
        elif victim is None:
            assert slot is None
            return multiple()
        else:
            assert slot == self.kept.pop(victim).slot
            assert not victim.usable
        assert slot is not None
        self.out.add(slot)
        return slot

    @rule(slot=consumes(taken))
    def give(self, slot: int) -> None:
        self.slots.give(slot)
        self.out.remove(slot)

    @rule(target=snapshots, slot=consumes(taken))
    def keep(self, slot: int) -> Snapshot:
        snapshot = self.slots.keep(slot, 7)
        self.out.remove(slot)
        self.kept[snapshot] = Entry(slot, self.used())
        return snapshot

    @rule(target=pinned, snapshot=snapshots)
    def pin(self, snapshot: Snapshot) -> object:
        if snapshot not in self.kept or self.kept[snapshot].unwanted:
            assert not snapshot.usable
            return multiple()
        self.slots.pin(snapshot)
        self.kept[snapshot].pins += 1
        return snapshot

    @rule(snapshot=consumes(pinned))
    def unpin(self, snapshot: Snapshot) -> None:
        self.slots.unpin(snapshot)
        entry = self.kept[snapshot]
        entry.pins -= 1
        entry.used = self.used()
        if entry.unwanted and not entry.pins:
            del self.kept[snapshot]

    @rule(target=taken, snapshot=consumes(pinned))
    def take_over(self, snapshot: Snapshot) -> object:
        if self.kept[snapshot].pins > 1:
            self.unpin(snapshot)
            return multiple()
        slot = self.slots.take_over(snapshot)
        assert slot == self.kept.pop(snapshot).slot
        self.out.add(slot)
        return slot

    @rule(snapshot=snapshots)
    def forget(self, snapshot: Snapshot) -> None:
        """Also one that is gone, or forgotten already."""
        self.slots.forget(snapshot)
        entry = self.kept.get(snapshot)
        if entry:
            entry.unwanted = True
            if not entry.pins:
                del self.kept[snapshot]

    @invariant()
    def every_slot_is_somewhere(self) -> None:
        assert self.slots.free == TOTAL - len(self.out) - len(self.kept)
        assert self.slots.snapshots == len(self.kept)
        assert self.slots.available == TOTAL - len(self.out) - sum(entry.pins > 0 for entry in self.kept.values())
        for snapshot, entry in self.kept.items():
            assert (snapshot.slot, snapshot.usable) == (entry.slot, not entry.unwanted)


TestKeeping = Keeping.TestCase
TestKeeping.settings = settings(max_examples=60, stateful_step_count=40)
