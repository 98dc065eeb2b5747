"""Which experts a streamed step copies, in which order and into which stream slots. Pure.

All absent experts of all layers are known when the step begins, and residency does not change during it. They are cut
into groups, layer after layer, none across layers. The stream slots are a small ring of groups: a group is requested as
soon as the one that had its slots before is finished, so up to `groups` of them are requested ahead of the GEMM.
"""

from copyengine.ring import CopyQuery


class StreamCursor:
    """Walks the groups of one step.

    `absent[l]` are the experts of layer l to copy, ascending. Group number i takes the slots from
    `first_slot + (i % groups) * group_slots` on, and flag `first_flag + i % groups`.
    """

    def __init__(
        self, absent: list[list[int]], groups: int, group_slots: int, first_slot: int, first_flag: int
    ) -> None:
        self._groups = groups
        self._queries: list[CopyQuery] = []
        for layer, experts in enumerate(absent):
            for i in range(0, len(experts), group_slots):
                part = tuple(experts[i : i + group_slots])
                turn = len(self._queries) % groups
                slot = first_slot + turn * group_slots
                slots = tuple(range(slot, slot + len(part)))
                self._queries.append(CopyQuery(first_flag + turn, "stream", layer, part, slots))
        self._requested = 0
        self._finished = 0

    def next_request(self) -> CopyQuery | None:
        """The next group to request; None if all are requested, or none of the stream slots is free."""
        if self._requested == len(self._queries) or self._requested - self._finished == self._groups:
            return None
        self._requested += 1
        return self._queries[self._requested - 1]

    def due(self, layer: int) -> CopyQuery | None:
        """The first unfinished group of the layers up to `layer`; it has been requested. None if all are finished."""
        if self._finished == self._requested or self._queries[self._finished].layer > layer:
            return None
        return self._queries[self._finished]

    def finish(self) -> None:
        """The due group is computed, or not wanted: its slots are free."""
        self._finished += 1
