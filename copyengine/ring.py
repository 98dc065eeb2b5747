"""The mailbox through which admission tells the copy engine what to copy: one writer, one reader, shared memory.

All fields are 32-bit words. The header is three cache lines, each with one writer:

```text
word  0  magic, version, capacity, MAX_QUERY       written once, when the ring is made
word 16  consumed, asleep, busy                    reader
word 32  step                                      writer: 1 while a step runs
word 48  capacity records of 272 words:
         sequence, flag, kind, layer, n, 11 unused, then MAX_QUERY pairs (expert, slot)
```

Record number i (from 0, modulo 2^32) lies in cell i % capacity and is there once the cell's sequence is i + 1. The
writer writes the body, then the sequence; the reader reads the body, then counts `consumed` up, which frees the cell.
A writer that dies in the middle leaves a body without its sequence, which is never seen.

Busy: microseconds, modulo 2^32, in which the reader had at least one query of a step under way, from its reading the
record until `over`; prefetch queries do not count. The writer looks when a step is over.

Sleeping: the reader may stop polling only while no step runs. It sets `asleep` and then looks at `step` once more; the
writer sets `step` and then looks at `asleep`. With a fence between the two on both sides at least one of them sees the
other: the reader stays awake, or the writer knows that it must send a Wake. Within a step the reader never sleeps,
however long the step pauses between two records.
"""

import time
from collections.abc import Callable
from typing import Literal

import numpy as np
from msgspec import Struct

from copyengine.busy_clock import BusyClock
from copyengine.protocol import MAX_QUERY
from copyengine.sync import Fence, nap
from copyengine.wire.errors import PeerTimeout, WireError

Array = np.ndarray[tuple[int], np.dtype[np.uint8]]
Kind = Literal["demand", "stream", "prefetch"]
KINDS: tuple[Kind, ...] = ("demand", "stream", "prefetch")

MAGIC = 0x534C5254
VERSION = 2
MASK = 0xFFFFFFFF
CONSUMED, ASLEEP, BUSY, STEP, CELLS = 16, 17, 18, 32, 48
SEQUENCE, FLAG, KIND, LAYER, COUNT, PAIRS = 0, 1, 2, 3, 4, 16
CELL_WORDS = PAIRS + 2 * MAX_QUERY


class CopyQuery(Struct, frozen=True):
    """Copy these experts of one layer into these slots, then raise the flag."""

    flag: int
    kind: Kind
    layer: int
    experts: tuple[int, ...]  # [n] n <= MAX_QUERY
    slots: tuple[int, ...]  # [n] slots[i] receives experts[i]


class Malformed(Struct, frozen=True):
    """A record that must not be carried out. `flag` is None if even that is out of range."""

    flag: int | None
    why: str


class Limits(Struct, frozen=True):
    """What the numbers in a record must stay below."""

    layers: int
    experts: int
    slots: int
    flags: int


def ring_nbytes(capacity: int) -> int:
    """Bytes of a ring of `capacity` records."""
    return 4 * (CELLS + capacity * CELL_WORDS)


class RingWriter:
    """Makes a ring in `array` ([>= ring_nbytes(capacity)] uint8) and writes its records. One thread at a time.

    `capacity` is a power of two, so that cells follow each other also where the record number wraps. `first` is the
    number of the first record. ValueError if the capacity is another or the array too small.
    """

    def __init__(self, array: Array, capacity: int, first: int = 0) -> None:
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"ring capacity {capacity} is not a power of two")
        if array.nbytes < ring_nbytes(capacity):
            raise ValueError(f"a ring of {capacity} records takes {ring_nbytes(capacity)} bytes, not {array.nbytes}")
        self._words = array[: ring_nbytes(capacity)].view(np.uint32)
        self._capacity = capacity
        self._next = first & MASK
        self._fence = Fence()
        self._busy = 0
        self._format()

    def _format(self) -> None:
        self._words[:] = 0
        self._words[CONSUMED] = self._next
        self._words[1:4] = (VERSION, self._capacity, MAX_QUERY)
        for number in range(self._next, self._next + self._capacity):  # as if the lap before had been written
            self._words[self._cell(number) + SEQUENCE] = (number + 1 - self._capacity) & MASK
        self._fence()
        self._words[0] = MAGIC

    def begin_step(self) -> bool:
        """Say that a step runs; True if the reader sleeps, so that it must be sent a Wake."""
        self._words[STEP] = 1
        self._fence()
        return bool(self._words[ASLEEP])

    def end_step(self) -> None:
        """Say that no step runs: the reader may sleep."""
        self._words[STEP] = 0

    def busy_us(self) -> int:
        """Microseconds since the last call in which the reader had a query under way, of those that it says are over.

        What it had not seen the end of at the last call is all in this one.
        """
        before, self._busy = self._busy, int(self._words[BUSY])
        return (self._busy - before) & MASK

    def try_put(self, query: CopyQuery) -> bool:
        """Write one record; False if the ring is full."""
        if ((self._next - int(self._words[CONSUMED])) & MASK) >= self._capacity:
            return False
        self._fence()  # the reader's last look at this cell came before its `consumed`
        cell, n = self._cell(self._next), len(query.experts)
        self._words[cell + FLAG : cell + COUNT + 1] = (query.flag, KINDS.index(query.kind), query.layer, n)
        pairs = self._words[cell + PAIRS : cell + PAIRS + 2 * n]
        pairs[0::2] = query.experts
        pairs[1::2] = query.slots
        self._next = (self._next + 1) & MASK
        self._fence()  # without it a weakly ordered CPU may show the sequence before the body
        self._words[cell + SEQUENCE] = self._next
        return True

    def put(self, query: CopyQuery, deadline_s: float, check: Callable[[], None]) -> None:
        """Write one record, waiting while the ring is full.

        PeerTimeout after `deadline_s`; `check` is called while waiting and may raise.
        """
        start = time.monotonic()
        while not self.try_put(query):
            check()
            waited = time.monotonic() - start
            if waited > deadline_s:
                raise PeerTimeout(f"the copy engine took no query from its full ring within {deadline_s:g} s")
            nap(waited)

    def _cell(self, number: int) -> int:
        return CELLS + (number % self._capacity) * CELL_WORDS


class RingReader:
    """Reads the ring in `array`, from the first record that no reader has consumed.

    WireError if there is no ring of this version in it.
    """

    def __init__(self, array: Array, limits: Limits) -> None:
        words = array[: array.nbytes // 4 * 4].view(np.uint32)
        if len(words) < CELLS or words[0] != MAGIC:
            raise WireError("the shared memory holds no ring")
        version, capacity, max_query = (int(w) for w in words[1:4])
        if (version, max_query) != (VERSION, MAX_QUERY):
            raise WireError(f"ring version {version} with queries of {max_query}; {VERSION} with {MAX_QUERY} expected")
        if capacity < 1 or capacity & (capacity - 1) or array.nbytes < ring_nbytes(capacity):
            raise WireError(f"a ring of {capacity} records does not fit in {array.nbytes} bytes")
        self._words = words.data  # a memoryview: an element costs a third of what numpy takes for one
        self._limits = limits
        self._capacity = capacity
        self._fence = Fence()
        self._busy = BusyClock()
        self._busy_before = int(words[BUSY])  # of a reader before this one
        self._expect(int(words[CONSUMED]))
        self.set_asleep(False)

    def pending(self) -> bool:
        """Whether `poll` would return a record."""
        return bool(self._words[self._cell + SEQUENCE] == self._after)

    def step_runs(self) -> bool:
        """Whether the writer is in a step, so that records may come at any moment."""
        return bool(self._words[STEP])

    def set_asleep(self, asleep: bool) -> None:
        """Say whether this ring is polled. After True, look at `step_runs` and `pending` again before sleeping."""
        self._words[ASLEEP] = int(asleep)
        self._fence()

    def poll(self) -> CopyQuery | Malformed | None:
        """The next record, None if there is none yet."""
        if self._words[self._cell] != self._after:  # SEQUENCE is word 0; this line is what polling costs
            return None
        self._fence()  # the body is read after the sequence
        record = self._read(self._cell)
        self._fence()  # and before the cell is given back
        self._words[CONSUMED] = self._after
        self._expect(self._after)
        if isinstance(record, CopyQuery) and record.kind != "prefetch":
            self._busy.begin(record.flag)
        return record

    def over(self, flag: int) -> None:
        """The query of `flag` has landed or failed. No-op if that was said before."""
        busy_us = self._busy.end(flag)
        if busy_us is not None:
            self._words[BUSY] = (self._busy_before + busy_us) & MASK

    def _expect(self, number: int) -> None:
        """`number` is the next record's."""
        self._cell = CELLS + (number % self._capacity) * CELL_WORDS
        self._after = (number + 1) & MASK  # its sequence, and the number of the one after it

    def _read(self, cell: int) -> CopyQuery | Malformed:
        flag, kind, layer, n = self._words[cell + FLAG : cell + COUNT + 1].tolist()
        limits = self._limits
        if flag >= limits.flags:
            return Malformed(None, f"flag {flag} of {limits.flags}")
        if kind >= len(KINDS) or layer >= limits.layers or n > MAX_QUERY:
            return Malformed(flag, f"kind {kind}, layer {layer} of {limits.layers}, {n} experts")
        pairs = self._words[cell + PAIRS : cell + PAIRS + 2 * n].tolist()
        experts, slots = tuple(pairs[0::2]), tuple(pairs[1::2])
        if n and (max(experts) >= limits.experts or max(slots) >= limits.slots):
            return Malformed(flag, f"expert {max(experts)} of {limits.experts}, slot {max(slots)} of {limits.slots}")
        return CopyQuery(flag, KINDS[kind], layer, experts, slots)
