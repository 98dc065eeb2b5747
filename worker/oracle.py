"""What an oracle's slots would have hit: Belady's MIN, the farthest next use first, by the rules of a layer's step.

Belady, A study of replacement algorithms for a virtual-storage computer (IBM Systems Journal 5, 1966). An expert that
is held from one reference to the next is a hit of the next one; as many such spans as possible are kept, so that S
slots suffice at every moment. At a layer's step of n experts all n are there at once, so that S - n others are; of more
than S, which pass query by query, one is at least. Whoever drops the span that ends last wherever there are too many
keeps most (interval scheduling on S machines).

Prefill on demand brings its experts too, to the oracle as to the policy, and is no hit of either: a decode step that
finds what a prompt has brought hits. Streamed steps bring nothing.
"""

import numpy as np

Marks = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Times = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Event = tuple[np.ndarray[tuple[int], np.dtype[np.signedinteger]], bool]
"""A layer's step: its experts, layer * E + expert, and whether it counts."""

UNHELD = -1
"""In place of a time: not held, or there is no use to hold it for."""


def oracle_hits(resident: Marks, routed: Marks, counted: list[bool], slots: int) -> int:
    """The most hits of S = `slots` slots in the steps that are `counted`, never less than any policy's.

    `resident` [L, E]: what is in the slots at first. `routed` [N, L, E]: the experts of each step's layers, of decode
    steps, which count, and of demand steps, which do not.
    """
    layers, experts = resident.shape
    events: list[Event] = []
    for step, counts in zip(routed, counted, strict=True):
        events += [(layer * experts + np.flatnonzero(row), counts) for layer, row in enumerate(step)]
    nexts, first = _next_uses(events, layers * experts)
    until = np.where(resident.reshape(-1), first, UNHELD)
    hits = 0
    for (keys, counts), following in zip(events, nexts, strict=True):
        if counts:
            hits += int((until[keys] != UNHELD).sum())
        until[keys] = UNHELD
        _keep(until, slots - len(keys) if len(keys) <= slots else slots - 1)
        until[keys] = following
        _keep(until, slots)
    return hits


def _next_uses(events: list[Event], keys: int) -> tuple[list[Times], Times]:
    """For the experts of each event the event that would hit them next, and [keys] the first one of each expert."""
    coming = np.full(keys, UNHELD, np.int64)
    nexts: list[Times] = []
    for time in range(len(events) - 1, -1, -1):
        of_event, counts = events[time]
        nexts.append(coming[of_event])
        coming[of_event] = time if counts else UNHELD
    return nexts[::-1], coming


def _keep(until: Times, most: int) -> None:
    """Drop what is held longest, in place, until `most` are held."""
    held = np.flatnonzero(until != UNHELD)
    if len(held) > most:
        until[held[np.argpartition(until[held], most - 1)[most:]] if most else held] = UNHELD
