"""The host backend: pool, flags, ring and banks in shared memory segments, copies by memcpy.

A copy is over when `copy` returns, so both streams are trivially in order. Segments belong to the process that made
them: its `close` removes the name. What a killed process leaves behind, `reclaim_stale` removes (see ledger.py).
"""

import errno
import hashlib
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from mmap import mmap
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NoReturn

import numpy as np

from copyengine.device import CLEARED, RELEASED, Bank, Bytes, HostMemory, Memory, OnBytes, Run, Stream, ledger
from copyengine.protocol import MemoryHandle
from copyengine.sync import Fence, nap
from copyengine.wire.errors import ConfigError, CopyFailed, PeerDied, PeerTimeout, WireError

NAME_CHARS = 30
"""macOS takes 31 characters, the leading slash among them."""

RESERVE_NBYTES = 256 << 20
"""What is taken at a time, so that an allocation of many GB shows progress and can be stopped."""


class Segment:
    """A run of shared memory. `array` is [nbytes] uint8, and empty after `close`."""

    pinned_nbytes = 0

    def __init__(self, shared: "_Shared", nbytes: int, ledger_file: Path | None) -> None:
        self.handle = MemoryHandle("shm", shared.name, nbytes)
        self.array: Bytes = np.frombuffer(shared.mapping(), np.uint8, nbytes)
        self._shared = shared
        self._ledger_file = ledger_file  # only the owner has one
        self._closed = False

    @property
    def nbytes(self) -> int:
        """See Memory."""
        return self.array.nbytes

    def close(self) -> None:
        """Give up the memory; the owner's close also removes the segment. A second call does nothing.

        Arrays that still look into the memory stay valid: the last of them unmaps it.
        """
        if self._closed:
            return
        self._closed = True
        self.array = np.empty(0, np.uint8)
        self._shared.close()
        if self._ledger_file is not None:
            self._shared.unlink()
            self._ledger_file.unlink(missing_ok=True)


def create_segment(run_id: str, label: str, nbytes: int, on_bytes: OnBytes | None = None) -> Segment:
    """A new segment of exactly `nbytes`, zeroed, owned by this process. ConfigError if the memory is not there.

    `on_bytes` hears how much has been taken, piece by piece; nothing is left if it raises.
    """
    if nbytes < 1:
        raise ValueError(f"a segment of {nbytes} bytes")
    while True:
        name = _name(run_id, label)
        ledger_file = ledger.enter(name)
        try:
            shared = _Shared(name, create=True, size=nbytes)
            shared.reserve(nbytes, on_bytes or (lambda _: None))
            return Segment(shared, nbytes, ledger_file)
        except FileExistsError:  # somebody else's: the name ends in chance, so another one will be free
            ledger_file.unlink()
        except (OSError, MemoryError) as error:
            ledger_file.unlink()
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise ConfigError(
                    f"cannot open a segment of shared memory ({label}): {error.strerror}; "
                    "let processes open more files (`ulimit -n`)"
                ) from None
            raise ConfigError(
                f"cannot allocate {nbytes} bytes of shared memory ({label}): {error}; "
                "free memory, raise the limit on shared memory, or ask for less"
            ) from None
        except BaseException:
            ledger_file.unlink()
            raise


def attach_segment(handle: MemoryHandle) -> Segment:
    """Map another process's segment. PeerDied if it is gone, WireError if it is not what the handle says."""
    if handle.kind != "shm":
        raise WireError(f"memory of kind {handle.kind} where a shared memory segment is needed")
    try:
        shared = _Shared(handle.name)
    except (FileNotFoundError, ValueError) as error:
        raise PeerDied(f"shared memory {handle.name} is gone, so its owner is: {error}") from None
    if not 0 < handle.nbytes <= shared.size:
        shared.close()
        raise WireError(f"shared memory {handle.name} has {shared.size} bytes, not {handle.nbytes}")
    return Segment(shared, handle.nbytes, None)


def reclaim_stale() -> list[str]:
    """Remove the segments whose owner is dead; their names. Safe while others do the same."""
    return _remove(ledger.stale())


def end_now(code: int) -> NoReturn:
    """End this process with exit code `code` although threads of it may be stuck: Python's own end would wait for them.

    Its segments are removed, whoever in it still uses them.
    """
    _remove(ledger.own())
    logging.shutdown()
    os._exit(code)


def _remove(entries: list[tuple[Path, str]]) -> list[str]:
    removed = []
    for path, name in entries:
        try:
            shared = _Shared(name)
        except (OSError, ValueError):  # gone, or its owner died before it had a size; or the name is another user's now
            pass
        else:
            shared.close()
            shared.unlink()
            removed.append(name)
        path.unlink(missing_ok=True)
    return removed


class HostWorkerDevice:
    """The worker's side."""

    def __init__(self) -> None:
        self._fence = Fence()

    def allocate(self, run_id: str, label: str, nbytes: int, on_bytes: OnBytes | None = None) -> HostMemory:
        """See WorkerDevice."""
        return create_segment(run_id, label, nbytes, on_bytes)

    def clear_flag(self, flags: HostMemory, index: int) -> None:
        """See WorkerDevice."""
        _words(flags)[index] = CLEARED

    def wait_flag(self, flags: HostMemory, index: int, deadline_s: float, check: Callable[[], None]) -> int:
        """See WorkerDevice."""
        words = _words(flags)
        start = time.monotonic()
        while (value := int(words[index])) == CLEARED:
            check()
            waited = time.monotonic() - start
            if waited > deadline_s:
                raise PeerTimeout(f"the copy engine did not finish a query within {deadline_s:g} s")
            nap(waited)
        self._fence()
        return value

    def release_flags(self, flags: HostMemory) -> None:
        """See WorkerDevice."""
        _words(flags)[:] = RELEASED


class HostCopyDevice:
    """The copy engine's side."""

    bank_threads = 1

    def __init__(self) -> None:
        self._fence = Fence()

    def allocate_bank(self, run_id: str, label: str, nbytes: int, on_bytes: OnBytes | None = None) -> Bank:
        """See CopyDevice. The bank is zeroed."""
        return create_segment(run_id, label, nbytes, on_bytes)

    def open(self, handle: MemoryHandle) -> HostMemory:
        """See CopyDevice."""
        return attach_segment(handle)

    def copy(self, stream: Stream, source: Bank, target: Memory, runs: Sequence[Run]) -> None:
        """See CopyDevice."""
        pool, bank = _array(target), source.array
        for run in runs:
            end = run.target_offset + run.nbytes
            if end > pool.nbytes:
                raise CopyFailed(f"bytes {run.target_offset}..{end} are outside a pool of {pool.nbytes}")
            np.copyto(pool[run.target_offset : end], bank[run.source_offset : run.source_offset + run.nbytes])

    def write_flag(self, stream: Stream, flags: Memory, index: int, value: int) -> None:
        """See CopyDevice."""
        self._fence()
        _array(flags).view(np.uint32)[index] = value

    def mark(self, stream: Stream, target: Memory) -> None:
        """See CopyDevice."""

    def is_done(self, token: object) -> bool:
        """See CopyDevice."""
        return True

    def close(self) -> None:
        """See CopyDevice."""


def _array(memory: Memory) -> Bytes:
    """What `open` has returned, as bytes."""
    assert isinstance(memory, Segment)
    return memory.array


def _words(flags: HostMemory) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return flags.array.view(np.uint32)


def _name(run_id: str, label: str) -> str:
    """`{run_id}-{label}-` and four random digits; what does not fit in a name is replaced by a digest."""
    stem = f"{run_id}-{label}"
    clean = re.sub(r"[^A-Za-z0-9_-]", "_", stem)
    if clean != stem or len(stem) > NAME_CHARS - 5:
        clean = f"{clean[: NAME_CHARS - 12]}-{hashlib.blake2s(stem.encode()).hexdigest()[:6]}"
    return f"{clean}-{secrets.token_hex(2)}"


_tracker_lock = threading.RLock()  # SharedMemory's constructor itself calls unlink when it fails
"""Below 3.13 a SharedMemory registers with a tracker that removes it when *any* process that attached ends. The tracker
keeps a set of names: registering and taking back must not interleave with another thread's."""


class _Shared(SharedMemory):
    """SharedMemory that no resource tracker knows of, and whose close() leaves the mapping to who still looks at it."""

    def __init__(self, name: str, create: bool = False, size: int = 0) -> None:
        if sys.version_info >= (3, 13):
            super().__init__(name, create, size, track=False)
        else:
            with _tracker_lock:
                super().__init__(name, create, size)
                if os.name == "posix":
                    resource_tracker.unregister(self._name, "shared_memory")  # type: ignore[attr-defined]

    def reserve(self, nbytes: int, on_bytes: OnBytes) -> None:
        """Take the memory now: without it, a full tmpfs shows as a SIGBUS at the first write."""
        try:
            for start in range(0, nbytes, RESERVE_NBYTES):
                length = min(RESERVE_NBYTES, nbytes - start)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._fd, start, length)  # type: ignore[attr-defined]
                on_bytes(length)
        except BaseException:
            self.close()
            self.unlink()
            raise

    def mapping(self) -> mmap:
        """The mapping itself; what looks into it keeps it alive."""
        assert self.buf is not None and isinstance(self.buf.obj, mmap)
        return self.buf.obj

    def close(self) -> None:
        """As SharedMemory's, but no error while arrays look into the memory."""
        try:
            super().close()
        except BufferError:
            self._mmap = None  # the last of these arrays unmaps it
            super().close()  # the file descriptor

    def unlink(self) -> None:
        """Remove the name; no error if it is removed already."""
        with _tracker_lock:
            if sys.version_info < (3, 13) and os.name == "posix":
                resource_tracker.register(self._name, "shared_memory")  # type: ignore[attr-defined]
            try:
                super().unlink()
            except FileNotFoundError:
                if sys.version_info < (3, 13):
                    resource_tracker.unregister(self._name, "shared_memory")  # type: ignore[attr-defined]
