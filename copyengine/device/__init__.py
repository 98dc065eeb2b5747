"""Memory that two processes share, copies into it and flags in it: one module per backend.

The protocols below are all that the rest knows of a backend. A worker owns a slot pool and flags on its device; the
copy engine opens both, copies expert records into the pool and raises a flag after them. Copies and flag writes of one
stream happen in the order of their calls. A stream on which a started copy fails carries out nothing that it was given
behind it: all of that fails too, and no flag of it is written.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np

from copyengine.protocol import MemoryHandle

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Stream = Literal["demand", "background"]

OnBytes = Callable[[int], None]

CLEARED, LANDED, FAILED, RELEASED = 0, 1, 2, 3
"""Values of a flag: not yet, all copies landed, a copy failed, nobody will ever write it."""


class Memory(Protocol):
    """A run of bytes that both sides can reach."""

    @property
    def handle(self) -> MemoryHandle:
        """What the other process opens it with."""
        ...

    @property
    def array(self) -> Bytes:
        """The bytes, [nbytes] uint8; empty after `close`."""
        ...

    def close(self) -> None:
        """Give up this process's access; the process that allocated it frees it. A second call does nothing."""
        ...


class WorkerDevice(Protocol):
    """What a worker needs: memory to export, and flags."""

    def allocate(self, run_id: str, label: str, nbytes: int, on_bytes: OnBytes | None = None) -> Memory:
        """Memory of exactly `nbytes`. ConfigError if there is not that much.

        `on_bytes` is called with the bytes that are there, piece by piece; what it raises ends the allocation.
        """
        ...

    def clear_flag(self, flags: Memory, index: int) -> None:
        """Set flag `index` to CLEARED, before the query that will raise it is rung."""
        ...

    def wait_flag(self, flags: Memory, index: int, deadline_s: float, check: Callable[[], None]) -> int:
        """The flag's value once it is not CLEARED; what was copied before it is then visible.

        PeerTimeout after `deadline_s`; `check` is called while waiting and may raise.
        """
        ...

    def release_flags(self, flags: Memory) -> None:
        """Set every flag to RELEASED, from any thread: nothing may wait for them any more."""
        ...


class CopyDevice(Protocol):
    """What the copy engine needs: to open memory, and streams that copy and write flags."""

    def open(self, handle: MemoryHandle) -> Memory:
        """Map memory of a worker's. PeerDied if it is gone, WireError if it is smaller than the handle says."""
        ...

    def copy(self, stream: Stream, source: Bytes, target: Memory, offset: int) -> Any:
        """Start a copy of `source` to bytes [offset, offset + len(source)) of `target`.

        Returns a token for `is_done`, None if the copy is over already. CopyFailed if it cannot be started, which
        leaves the stream as it was.
        """
        ...

    def is_done(self, token: Any) -> bool:
        """Whether the copy is over. CopyFailed if it failed after its start, by itself or with one before it."""
        ...

    def write_flag(self, stream: Stream, flags: Memory, index: int, value: int) -> None:
        """Write flag `index` after everything that this stream was given so far, and only if none of it failed.

        Copies whose failure `is_done` has told are behind us: they hold no later write back.
        """
        ...
