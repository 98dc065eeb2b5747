"""The recurrent state of one running request: where it starts from and when snapshots are made of it. Pure.

Snapshots are made at page boundaries, since KV is shared in whole pages. Two kinds are left behind for good: before the
last token of the prompt, so that the same prompt and those that go on from it reuse all they can, and where the prompt
leaves what was cached without a snapshot, so that the next one that leaves there does not compute it once more. A third
moves along with the request: a chunk at a time through its prompt and a page at a time through its answer. It is there
for the next turn, and for the request itself if it is preempted.

Where answers are to repeat bit for bit, snapshots are made at coarser boundaries, and along prompts alone: `paging.py`.
"""

from collections.abc import Sequence

from msgspec import Struct

from scheduler.prefix_cache import Node, PrefixCache
from scheduler.state_slots import Snapshot, StateSlots


class Moves(Struct, frozen=True):
    """What a step does with the state of one sequence, as worker.protocol.SequenceStep says it."""

    state: int = -1
    restore: int = -1
    snapshots: list[tuple[int, int]] = []


STATELESS = Moves()
"""Of a model without recurrent state."""


def snapshot_positions(
    start: int, end: int, prompt_tokens: int, branch: int, cut_tokens: int
) -> tuple[list[int], int | None]:
    """Where a step that computes positions `start` .. `end` - 1 makes snapshots to be left, and the moving one if any.

    `branch` is where the prompt leaves what is cached. All lie at multiples of `cut_tokens`, as `branch` does.
    """
    last = (prompt_tokens - 1) // cut_tokens * cut_tokens
    left = sorted(position for position in {last, min(branch, last)} if start < position <= end)
    moving = end // cut_tokens * cut_tokens
    return left, moving if moving > start and moving not in left else None


class OwnState:
    """One request's slot, what it starts from, and the snapshots it has made."""

    __slots__ = ("_loose", "_made", "_moving", "_moving_to", "_slots", "_source", "_writing", "branch", "slot")

    def __init__(self, slots: StateSlots) -> None:
        self.slot = -1
        self.branch = 0  # see `snapshot_positions`
        self._slots = slots
        self._source: Snapshot | None = None  # pinned until a step has copied it
        self._writing: list[tuple[int, int]] = []  # (position, slot) of the step that is out
        self._moving: Snapshot | None = None
        self._moving_to: int | None = None  # position of that among _writing
        self._made: list[Snapshot] = []
        self._loose: list[Snapshot] = []  # made, and their node is not there yet

    def open(self) -> None:
        """Take a slot, one of which must be available or be what it starts from alone."""
        slot = self._slots.take()
        if slot is None:
            assert self._source is not None
            slot, self._source = self._slots.take_over(self._source), None
        self.slot = slot

    def start_from(self, snapshot: Snapshot) -> None:
        """The next step goes on from `snapshot` instead of what it would have."""
        self._slots.pin(snapshot)
        self._let_source_go()
        self._source = snapshot

    def moves(self, left: list[int], moving: int | None) -> Moves:
        """For the next step, which makes snapshots at these positions, as far as slots can be had."""
        self._moving_to = moving
        for position in left if moving is None else [*left, moving]:
            if position == moving and not self._slots.free:
                self._forget_moving()  # rather than what another request has left
            slot = self._slots.take()
            if slot is not None:
                self._writing.append((position, slot))
        return Moves(self.slot, self._source.slot if self._source else -1, list(self._writing))

    def settle(self) -> None:
        """The step is back without an error: what it wrote counts from now on."""
        self._let_source_go()
        for position, slot in self._writing:
            snapshot = self._slots.keep(slot, position)
            self._loose.append(snapshot)
            self._made.append(snapshot)
            if position == self._moving_to:
                self._forget_moving()
                self._moving = snapshot
        self._writing = []

    def attach(self, cache: PrefixCache, node: Node, tokens: Sequence[int]) -> None:
        """Leave to the nodes of `tokens`, on whose path `node` is, the snapshots that are theirs."""
        if not self._loose:
            return
        self._loose = [s for s in self._loose if s.usable and not self._left_to_node(s, cache, node, tokens)]
        self._made = [snapshot for snapshot in self._made if snapshot.usable]

    def close(self, trusted: bool = True) -> None:
        """The request is over, or starts again: its slot is free, and with it what is still loose.

        Not `trusted`: all the snapshots that it has made are.
        """
        self._let_source_go()
        for slot in (self.slot, *(slot for _, slot in self._writing)):
            self._slots.give(slot)
        for snapshot in self._loose if trusted else self._made:
            self._slots.forget(snapshot)

    def _left_to_node(self, snapshot: Snapshot, cache: PrefixCache, node: Node, tokens: Sequence[int]) -> bool:
        """Whether the node of `snapshot` is there; it has a snapshot then, be it another one."""
        home = cache.at(tokens, snapshot.position, node)
        if home is None:
            return False
        if home.has_state:
            self._slots.forget(snapshot)
        else:
            home.snapshot = snapshot
        return True

    def _forget_moving(self) -> None:
        """Where it was last, it is of no more use. One that another request is about to start from is left."""
        if self._moving is not None and not self._moving.pins:
            self._slots.forget(self._moving)

    def _let_source_go(self) -> None:
        if self._source is not None:
            self._slots.unpin(self._source)
            self._source = None
