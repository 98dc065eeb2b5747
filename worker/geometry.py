"""Sizes of a slot pool."""

from msgspec import Struct

from copyengine.protocol import MAX_QUERY


class SlotGeometry(Struct, frozen=True):
    """Sizes of a pool: S cache slots, then `stream_groups` groups of min(E, max_query) stream slots."""

    layers: int  # L
    experts: int  # E
    record_nbytes: int
    slots: int  # S
    stream_groups: int = 2
    max_query: int = MAX_QUERY
    logged_steps: int = 0  # of worker.routing_log
    half_life: int = 0  # of a use in the score of the cache policy "lrfu", in admitted queries; 0: "lru"

    @property
    def group_slots(self) -> int:
        """Stream slots of one group."""
        return min(self.experts, self.max_query)

    @property
    def stream_slots(self) -> int:
        """Stream slots of all groups."""
        return self.stream_groups * self.group_slots

    @property
    def pool_slots(self) -> int:
        """Cache and stream slots."""
        return self.slots + self.stream_slots
