"""The worker's end by itself: the copy engine is played by hand, through a reader and the flags."""

import threading

import numpy as np
import pytest

from copyengine.device import FAILED, LANDED, RELEASED
from copyengine.device.host import HostCopyDevice, HostWorkerDevice
from copyengine.ring import CopyQuery, Limits, RingReader
from copyengine.wire.errors import CopyFailed, PeerDied, PeerTimeout
from worker.mailbox import Mailbox

QUERIES = [CopyQuery(flag, "demand", 0, (flag,), (flag,)) for flag in range(4)]


class Rig:
    def __init__(self, deadline_s: float = 10) -> None:
        self.wakes = 0
        self.mailbox = Mailbox(HostWorkerDevice(), "test", "w", 4, self._wake, deadline_s)
        request = self.mailbox.attach_request("w", self.mailbox._flags, 4)
        self.device = HostCopyDevice()
        self.ring, self.flags = self.device.open(request.ring), self.device.open(request.flags)
        self.reader = RingReader(self.ring.array, Limits(1, 4, 4, 4))

    def _wake(self) -> None:
        self.wakes += 1

    def write(self, flag: int, value: int) -> None:
        self.device.write_flag("demand", self.flags, flag, value)

    def close(self) -> None:
        self.mailbox.close()
        self.ring.close()
        self.flags.close()


@pytest.fixture
def rig() -> "Rig":
    return Rig()


def test_a_flag_is_cleared_before_its_query_is_rung_again(rig: Rig) -> None:
    """The value of the query before must not be taken for this one's."""
    for _ in range(3):
        rig.mailbox.ring(QUERIES[0])
        assert rig.reader.poll() == QUERIES[0] and rig.flags.array.view(np.uint32)[0] == 0
        threading.Timer(0.02, rig.write, [0, LANDED]).start()
        rig.mailbox.wait(0)
        rig.mailbox.wait(0)  # nothing is under way: at once
    rig.close()


def test_settle_tells_what_did_not_land(rig: Rig) -> None:
    for query in QUERIES[:3]:
        rig.mailbox.ring(query)
    for flag, value in enumerate((LANDED, FAILED, LANDED)):
        rig.write(flag, value)
    with pytest.raises(CopyFailed, match="layer 0"):
        rig.mailbox.wait(1)
    assert rig.mailbox.settle() == [QUERIES[1]]
    assert rig.mailbox.settle() == []
    rig.mailbox.ring(QUERIES[1])  # its flag is free again
    rig.close()


def test_wakes_only_a_reader_that_sleeps(rig: Rig) -> None:
    for asleep, wakes in ((False, 0), (True, 1), (False, 1)):
        rig.reader.set_asleep(asleep)
        rig.mailbox.begin_step()
        assert rig.reader.step_runs() and rig.wakes == wakes
        rig.mailbox.end_step()
        assert not rig.reader.step_runs()
    rig.close()


def test_a_time_out_is_for_ever() -> None:
    """The copy may still come: the slots cannot be trusted any more."""
    rig = Rig(deadline_s=0.05)
    for query in QUERIES[:2]:
        rig.mailbox.ring(query)
    with pytest.raises(PeerTimeout):
        rig.mailbox.wait(0)
    assert rig.mailbox.settle() == QUERIES[:2]
    for refused in (rig.mailbox.begin_step, lambda: rig.mailbox.ring(QUERIES[2])):
        with pytest.raises(PeerDied, match=r"0\.05 s"):
            refused()
    assert rig.flags.array.view(np.uint32)[3] == RELEASED
    rig.close()


def test_the_first_reason_of_a_release_stays(rig: Rig) -> None:
    rig.mailbox.release("first")
    rig.mailbox.release("second")
    with pytest.raises(PeerDied, match="first"):
        rig.mailbox.begin_step()
    rig.close()
    rig.mailbox.release("after close: no error")
