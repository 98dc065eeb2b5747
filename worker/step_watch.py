"""The host's side of a step that runs on a device: waiting for its end with a deadline, and ending it by force.

A step waits on the device for flags, which nobody but the copy engine raises. `release` raises them in its place, and
the word from which on admission rings nothing, again and again until the step is over: a launch that was already past
its look at the word clears a flag once more.
"""

import threading
import time
from collections.abc import Callable

from copyengine.device import CLEARED, RELEASED
from copyengine.device.cuda_driver import CudaError
from copyengine.sync import nap
from copyengine.wire.errors import PeerDied, PeerTimeout
from copyengine.wire.logs import Log
from worker.step_device import StepDevice, StepStream

END_S = 10.0
"""Seconds that the device may take to end a step after a release: its GEMMs, without any copy."""

RAISE_EVERY_S = 2e-3
"""Between two rounds of raising the flags of a released pool while its last step ends."""

CLOSE_S = 2.0
"""Seconds that a round of raising may take to end at the close."""

log = Log(__name__)


class StepWatch:
    """One thread begins, waits for and ends steps; `release` may be called from others."""

    def __init__(
        self,
        device: StepDevice,
        stream: StepStream,
        flags: tuple[int, int],
        error_word: int,
        deadline_s: float,
        on_release: Callable[[str], None],
    ) -> None:
        """`flags` are address and number of the flags, `error_word` the address of admission's error word.

        `on_release` hears the reason of the first release, on the thread that released, whatever the device does.
        """
        self._device = device
        self._stream = stream
        self._flags = flags
        self._error_word = error_word
        self._deadline_s = deadline_s
        self._on_release = on_release
        self._lock = threading.Lock()
        self._why: str | None = None
        self._released_s = 0.0
        self._marks: list[Callable[[], bool]] = []  # the ends of the step's layers
        self._over = threading.Event()  # no step runs
        self._over.set()
        self._raising: threading.Thread | None = None

    @property
    def ended(self) -> bool:
        """Whether the device has ended every step it was given, so that what they use may be freed."""
        return self._over.is_set()

    def check(self) -> None:
        """PeerDied after a release."""
        if self._why is not None:
            raise PeerDied(self._why)

    def begin(self) -> None:
        """A step begins. PeerDied after a release."""
        self.check()
        self._marks = []
        self._over.clear()

    def mark(self) -> None:
        """The stream was given another layer. Nothing while a graph is captured."""
        mark = self._stream.mark()
        if mark is not None:
            self._marks.append(mark)

    def wait(self) -> None:
        """Return when the stream has done all that was marked.

        Each mark may take `deadline_s`, after which the pool is released; from a release on, all of them END_S.
        PeerTimeout if that is not enough either.
        """
        for mark in self._marks:
            start = time.monotonic()
            while not mark():
                now = time.monotonic()
                if self._why is not None and now - self._released_s > END_S:
                    raise PeerTimeout(f"{self._why}; and the device has not ended its step {END_S:g} s later")
                if self._why is None and now - start > self._deadline_s:
                    self.release(f"the copy engine did not finish a layer's copies within {self._deadline_s:g} s")
                nap(now - start)
        self._marks.clear()

    def wait_for_flags(self) -> None:
        """Wait until no query is under way: a step that ended early has rung for more than it waited for."""
        start = time.monotonic()
        while self._why is None and CLEARED in self._device.read_words(*self._flags):
            waited = time.monotonic() - start
            if waited > self._deadline_s:
                self.release(f"the copy engine did not finish a failed step's copies within {self._deadline_s:g} s")
            nap(waited)

    def end(self) -> None:
        """The step is over, and nothing of it runs on the device."""
        self._over.set()

    def release(self, why: str) -> None:
        """End every wait; from now on `check` and `begin` raise PeerDied(why). From any thread."""
        with self._lock:
            if self._why is not None:
                return
            self._released_s = time.monotonic()
            self._why = why
        try:
            if self._raise_all() and not self._over.is_set():
                self._raising = threading.Thread(target=self._raise_until_over, name="release", daemon=True)
                self._raising.start()
        finally:
            self._on_release(why)

    def close(self) -> None:
        """Raise no more flags: they are about to be freed."""
        self._over.set()
        if self._raising is not None:
            self._raising.join(CLOSE_S)

    def _raise_until_over(self) -> None:
        while not self._over.wait(RAISE_EVERY_S) and self._raise_all():
            pass

    def _raise_all(self) -> bool:
        """False if the device is broken, where nothing waits for a flag any more."""
        try:
            self._device.write_words(self._error_word, 1, 1)
            address, count = self._flags
            self._device.write_words(address, RELEASED, count)
        except (CudaError, RuntimeError) as error:
            log.error("flags_not_raised", detail=str(error))
            return False
        return True
