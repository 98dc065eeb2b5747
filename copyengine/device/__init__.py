"""Memory that two processes share, copies into it and flags in it: one module per backend.

The protocols below are all that the rest knows of a backend. A worker owns a slot pool and flags on its device; the
copy engine opens both, copies expert records from its banks into the pool and raises a flag after them.

A *link* is what copies to one device share: a GPU, named by `MemoryHandle.device`; "" is the host's memory. A link has
two streams. Copies and flag writes of one stream happen in the order of their calls. A stream on which a started copy
fails carries out nothing that it was given behind it: all of that fails too, and no flag of it is written.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from msgspec import Struct

from copyengine.protocol import MemoryHandle

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Stream = Literal["demand", "background"]
STREAMS: tuple[Stream, ...] = ("demand", "background")

OnBytes = Callable[[int], None]

CLEARED, LANDED, FAILED, RELEASED = 0, 1, 2, 3
"""Values of a flag: not yet, all copies landed, a copy failed, nobody will ever write it."""


class Run(Struct, frozen=True, gc=False):
    """Bytes to copy in one go, from `source_offset` of a bank to `target_offset` of a pool."""

    source_offset: int
    target_offset: int
    nbytes: int


class Memory(Protocol):
    """A run of bytes that both sides can reach."""

    @property
    def handle(self) -> MemoryHandle:
        """What the other side opens it with."""
        ...

    @property
    def nbytes(self) -> int:
        """Its length; 0 after `close`."""
        ...

    def close(self) -> None:
        """Give up this process's access; the process that allocated it frees it. A second call does nothing."""
        ...


class Bank(Protocol):
    """Host memory that copies start from."""

    @property
    def nbytes(self) -> int:
        """Its length; 0 after `close`."""
        ...

    @property
    def pinned_nbytes(self) -> int:
        """How many bytes, from the first on, a GPU copies by itself; the others go by way of the processor."""
        ...

    @property
    def array(self) -> Bytes:
        """The bytes, [nbytes] uint8; empty after `close`."""
        ...

    def close(self) -> None:
        """Free it. A second call does nothing."""
        ...


class HostMemory(Memory, Bank, Protocol):
    """Memory of both sides that the processor can read and write."""


class WorkerDevice(Protocol):
    """What a worker whose device is the host's memory needs: memory to export, and flags."""

    def allocate(self, run_id: str, label: str, nbytes: int, on_bytes: OnBytes | None = None) -> HostMemory:
        """Memory of exactly `nbytes`. ConfigError if there is not that much.

        `on_bytes` is called with the bytes that are there, piece by piece; what it raises ends the allocation.
        """
        ...

    def clear_flag(self, flags: HostMemory, index: int) -> None:
        """Set flag `index` to CLEARED, before the query that will raise it is rung."""
        ...

    def wait_flag(self, flags: HostMemory, index: int, deadline_s: float, check: Callable[[], None]) -> int:
        """The flag's value once it is not CLEARED; what was copied before it is then visible.

        PeerTimeout after `deadline_s`; `check` is called while waiting and may raise.
        """
        ...

    def release_flags(self, flags: HostMemory) -> None:
        """Set every flag to RELEASED, from any thread: nothing may wait for them any more."""
        ...


class CopyDevice(Protocol):
    """What the copy engine needs: banks, to open workers' memory, and streams that copy and write flags.

    Banks are allocated and memory is opened and closed by any thread; streams are used by one thread at a time.
    """

    @property
    def bank_threads(self) -> int:
        """How many banks are best allocated at a time."""
        ...

    def allocate_bank(self, run_id: str, label: str, nbytes: int, on_bytes: OnBytes | None = None) -> Bank:
        """A bank of exactly `nbytes`. ConfigError if there is not that much memory.

        `on_bytes` is called with the bytes that are there, piece by piece; what it raises ends the allocation.
        """
        ...

    def open(self, handle: MemoryHandle) -> Memory:
        """Map memory of a worker's. PeerDied if it is gone, WireError if it is not what the handle says."""
        ...

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        """Start copies from `source` to `target`. CopyFailed if one of `runs` cannot be started.

        Those before it may have been started; they are behind us for `mark` and `write_flag` like any other.
        """
        ...

    def write_flag(self, stream: Stream, flags: Memory, index: int, value: int) -> None:
        """Write flag `index` after everything that this stream was given so far, and only if none of it failed.

        Copies whose failure `is_done` has told are behind us: they hold no later write back.
        """
        ...

    def mark(self, stream: Stream, target: Memory) -> Any:
        """A token for all that the stream of `target`'s link was given so far; None if all of it is over already.

        Tokens of one stream are done in the order of their marks.
        """
        ...

    def is_done(self, token: Any) -> bool:
        """Whether all of it is over; a token that was is not asked for again.

        CopyFailed, which also is an end, if a copy among it failed since the mark before.
        """
        ...

    def close(self) -> None:
        """Give up the device, after all banks and opened memory are closed."""
        ...
