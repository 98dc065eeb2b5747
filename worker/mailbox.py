"""The worker's end of the data plane: the ring it writes, the flags it waits for, and which queries are under way."""

import contextlib
from collections.abc import Callable

from copyengine.device import LANDED, Memory, WorkerDevice
from copyengine.device.host import create_segment
from copyengine.protocol import Attach
from copyengine.ring import CopyQuery, RingWriter, ring_nbytes
from copyengine.wire.errors import CopyFailed, PeerDied, PeerError, PeerTimeout

RING_CAPACITY = 64
"""Records; a writer that finds the ring full waits for the copy engine to take one."""

COPY_DEADLINE_S = 30.0
"""Seconds that a step waits for one query's copies, of 128 experts at most: tenths of a second at the slowest link, but
unpinned ones may have to come back from swap. When they are over the copy engine is taken for dead, and the worker
ends: a copy that lands later would hit a slot that holds another expert by then."""


class Mailbox:
    """Rings queries and waits for them. One thread, except for `release`.

    `wake` is called at the start of a step if the copy engine sleeps: it must make somebody send a Wake, and return at
    once. Every wait ends by the flag, by `deadline_s` (PeerTimeout) or by `release` (PeerDied). A time-out releases the
    mailbox too, for a copy that is late could land in a slot that by then holds another expert. `on_release` hears the
    reason of the first release, on the thread that released.
    """

    def __init__(
        self,
        device: WorkerDevice,
        run_id: str,
        worker: str,
        flag_count: int,
        wake: Callable[[], None],
        deadline_s: float,
        on_release: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._device = device
        self._wake = wake
        self._on_release = on_release
        self._deadline_s = deadline_s
        self._why_released: str | None = None
        self._underway: dict[int, CopyQuery] = {}  # by flag
        self._flags = device.allocate(run_id, f"{worker}-flags", 4 * flag_count)
        try:
            self._ring = create_segment(run_id, f"{worker}-ring", ring_nbytes(RING_CAPACITY))
        except BaseException:
            self._flags.close()
            raise
        self._writer = RingWriter(self._ring.array, RING_CAPACITY)

    def attach_request(self, worker: str, pool: Memory, pool_slots: int) -> Attach:
        """What tells the copy engine to serve this mailbox."""
        return Attach(worker, pool.handle, self._flags.handle, self._ring.handle, pool_slots)

    def begin_step(self) -> None:
        """A step starts: the copy engine polls the ring until `end_step`. PeerDied after a release."""
        self._check()
        if self._writer.begin_step():
            self._wake()

    def end_step(self) -> int:
        """The step is over; the copy engine may sleep. Microseconds for which copies were under way, see RingWriter."""
        self._writer.end_step()
        return self._writer.busy_us()

    def ring(self, query: CopyQuery) -> None:
        """Ask for the copies of `query`, whose flag no query under way has. PeerTimeout, PeerDied."""
        assert query.flag not in self._underway
        self._device.clear_flag(self._flags, query.flag)
        self._underway[query.flag] = query
        self._check()  # after the clearing: a release from now on sets the flag again
        try:
            self._writer.put(query, self._deadline_s, self._check)
        except PeerTimeout as error:
            self.release(str(error))
            raise

    def wait(self, flag: int) -> None:
        """Return when the query of `flag` has landed, at once if none is under way.

        CopyFailed, PeerTimeout, PeerDied: it did not land, and is under way until `settle`.
        """
        if flag not in self._underway:
            return
        try:
            value = self._device.wait_flag(self._flags, flag, self._deadline_s, self._check)
        except PeerTimeout as error:
            self.release(str(error))
            raise
        if value == LANDED:
            del self._underway[flag]
            return
        self._check()
        query = self._underway[flag]
        raise CopyFailed(f"{len(query.experts)} experts of layer {query.layer} did not land")

    def settle(self) -> list[CopyQuery]:
        """Wait for every query under way; those that did not land. None is under way afterwards."""
        for flag in list(self._underway):
            with contextlib.suppress(CopyFailed, PeerError):
                self.wait(flag)
        lost = list(self._underway.values())
        self._underway.clear()
        return lost

    def release(self, why: str) -> None:
        """No wait may go on: the copy engine is gone. From any thread; everything from now on raises PeerDied."""
        first = self._why_released is None
        if first:
            self._why_released = why
        self._device.release_flags(self._flags)
        if first:
            self._on_release(why)

    def close(self) -> None:
        """Give up the ring and the flags."""
        self._ring.close()
        self._flags.close()

    def _check(self) -> None:
        if self._why_released is not None:
            raise PeerDied(self._why_released)
