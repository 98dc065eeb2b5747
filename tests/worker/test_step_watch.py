"""Waiting for a step's end and ending it by force, over a device in a few lines: against what the docstrings say."""

import threading
import time
from collections.abc import Callable

import pytest

from copyengine.device import CLEARED, LANDED, RELEASED
from copyengine.device.cuda_driver import CudaError
from copyengine.wire.errors import PeerDied, PeerTimeout
from worker import step_watch
from worker.step_watch import StepWatch

FLAGS, ERROR = (100, 3), 200


class Device:
    """Three flags at 100 and a word at 200. `hung`: its stream goes on by nothing."""

    has_stream_waits = True

    def __init__(self) -> None:
        self.words = {100: LANDED, 101: LANDED, 102: LANDED, ERROR: 0}
        self.rounds = 0
        self.broken = self.hung = False

    def write_words(self, address: int, value: int, count: int) -> None:
        if self.broken:
            raise CudaError("cuMemsetD32Async", "CUDA_ERROR_UNKNOWN")
        self.rounds += address == ERROR
        self.words |= dict.fromkeys(range(address, address + count), value)

    def read_words(self, address: int, count: int) -> list[int]:
        return [self.words[i] for i in range(address, address + count)]

    def wait_flag(self, stream: int, address: int) -> None: ...

    def allocate(self, *_: object) -> None: ...

    def map_ring(self, *_: object) -> None: ...

    # Its stream

    def handle(self) -> int:
        return 0

    def mark(self) -> Callable[[], bool]:
        return lambda: not self.hung and CLEARED not in self.read_words(*FLAGS)

    def synchronize(self) -> None: ...


def watch_on(device: Device, deadline_s: float = 5.0) -> tuple[StepWatch, list[str]]:
    told: list[str] = []
    return StepWatch(device, device, FLAGS, ERROR, deadline_s, told.append), told  # type: ignore[arg-type]


def test_a_step_that_ends_is_waited_for_and_nothing_is_raised() -> None:
    device = Device()
    watch, told = watch_on(device)
    watch.begin()
    assert not watch.ended
    device.words[101] = CLEARED
    watch.mark()
    threading.Timer(0.05, lambda: device.words.update({101: LANDED})).start()
    watch.wait()
    watch.end()
    assert watch.ended and not told and device.rounds == 0


def test_a_release_ends_the_wait_and_every_step_after_it() -> None:
    device = Device()
    watch, told = watch_on(device)
    watch.begin()
    device.words[100] = CLEARED
    watch.mark()
    releasing = threading.Timer(0.05, watch.release, ["gone"])
    releasing.start()
    watch.wait()
    releasing.join()
    assert device.words == {100: RELEASED, 101: RELEASED, 102: RELEASED, ERROR: 1}
    for call in (watch.check, watch.begin):
        with pytest.raises(PeerDied, match="gone"):
            call()
    watch.release("again")
    assert told == ["gone"]
    watch.end()


def test_flags_are_raised_again_until_the_step_is_over() -> None:
    """A launch that is past its look at the error word clears a flag after the release."""
    device = Device()
    watch, _ = watch_on(device)
    watch.begin()
    watch.release("gone")
    device.words[102] = CLEARED
    watch.mark()
    watch.wait()
    watch.end()
    watch.close()
    rounds = device.rounds
    time.sleep(5 * step_watch.RAISE_EVERY_S)
    assert rounds > 1 and device.rounds == rounds


def test_nothing_is_raised_again_where_no_step_runs() -> None:
    device = Device()
    watch, told = watch_on(device)
    watch.release("gone")
    assert device.rounds == 1 and told == ["gone"] and watch.ended


def test_a_deadline_releases_with_its_own_reason() -> None:
    device = Device()
    watch, told = watch_on(device, deadline_s=0.05)
    watch.begin()
    device.words[100] = CLEARED
    watch.mark()
    watch.wait()
    with pytest.raises(PeerDied, match=r"a layer's copies within 0\.05 s"):
        watch.check()
    assert len(told) == 1
    watch.end()


def test_a_device_that_ends_nothing_is_given_up_and_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """END_S counts from the release on; the flags go on being raised, for all that is known."""
    monkeypatch.setattr(step_watch, "END_S", 0.1)
    device = Device()
    device.hung = True
    watch, _ = watch_on(device, deadline_s=0.2)
    watch.begin()
    watch.mark()
    watch.mark()
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"copies within 0\.2 s; and the device has not ended"):
        watch.wait()
    assert 0.3 <= time.monotonic() - start < 10
    assert not watch.ended
    rounds = device.rounds
    time.sleep(5 * step_watch.RAISE_EVERY_S)
    assert device.rounds > rounds
    watch.close()


def test_a_broken_device_still_tells_who_must_know() -> None:
    device = Device()
    watch, told = watch_on(device)
    watch.begin()
    device.broken = True
    watch.release("the device does not work any more")
    assert told == ["the device does not work any more"]
    with pytest.raises(PeerDied):
        watch.check()


def test_what_was_rung_and_not_waited_for_is_waited_for() -> None:
    device = Device()
    watch, told = watch_on(device)
    device.words[102] = CLEARED
    threading.Timer(0.05, lambda: device.words.update({102: LANDED})).start()
    watch.wait_for_flags()
    assert not told
