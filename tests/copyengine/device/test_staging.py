"""Host memory that cannot be pinned, over a driver in Python that refuses: all lands as if it could be.

On a GPU: tests/copyengine/test_cuda_unpinned.py.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from copyengine.copier import Copier
from copyengine.device import FAILED, LANDED, Bank, Run, pinned, staging
from copyengine.device.cuda import CudaMemory
from copyengine.device.cuda_worker import DeviceMemory
from copyengine.protocol import CopyCounters
from copyengine.ring import KINDS
from copyengine.wire.errors import CopyFailed
from tests.copyengine.device import test_cuda
from tests.copyengine.device.fake_cuda import CUresult, FakeMachine
from tests.copyengine.device.test_cuda import Rig, Served, content
from tests.copyengine.test_copier import until

PAGE = 4096
EXPERTS, SLOTS, RECORD = 10, 20, 3000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that a record fills more than twice, registrations down to a page, records that straddle those."""
    monkeypatch.setattr(pinned, "LEAST_PIN_NBYTES", PAGE)
    monkeypatch.setattr(staging, "STAGE_NBYTES", 1024)
    for name, value in (("EXPERTS", EXPERTS), ("SLOTS", SLOTS), ("RECORD", RECORD)):
        monkeypatch.setattr(test_cuda, name, value)


@contextmanager
def refusing(share: float, buffers: bool = True, gpus: int = 1) -> Iterator[tuple[Rig, Bank]]:
    """A rig where this share of a bank's pages may be pinned, and the bank, of random bytes."""
    rig = Rig(FakeMachine(gpus))
    pages = -(-EXPERTS * RECORD // PAGE)
    rig.cuda.pin_limit_nbytes = int(share * pages) * PAGE
    rig.cuda.no_pinned_buffers = not buffers
    bank = rig.device.allocate_bank("run", "bank", EXPERTS * RECORD)
    bank.array[:] = np.random.default_rng(0).integers(0, 256, bank.nbytes, np.uint8)
    yield rig, bank
    bank.close()
    assert not rig.cuda.registered
    rig.close()


@contextmanager
def opened(rig: Rig, gpu: int = 0) -> Iterator[tuple[DeviceMemory, CudaMemory]]:
    """A pool, and the copy engine's side of it."""
    pool = rig.workers[gpu].allocate(SLOTS * RECORD)
    theirs = rig.device.open(pool.handle)
    yield pool, theirs
    theirs.close()
    pool.close()


def bytes_of(memory: DeviceMemory, rig: Rig, gpu: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Its content."""
    return np.array(content(memory, rig.workers[gpu]), np.uint32).view(np.uint8)


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_any_run_lands_from_a_bank_of_which_a_share_is_pinned(share: float, buffers: bool) -> None:
    """On two GPUs at once; every byte is copied once, the pinned ones straight from where they lie."""
    with refusing(share, buffers, gpus=2) as (rig, bank):
        assert bank.pinned_nbytes == (bank.nbytes if share == 1 else share * 8 * PAGE)
        with opened(rig) as (pool, theirs), opened(rig, 1) as (pool1, theirs1):
            rng = random.Random(1)
            for one, memory, gpu in [(pool, theirs, 0), (pool1, theirs1, 1)] * 10:
                start, nbytes, to = rng.randrange(EXPERTS * RECORD), rng.choice((1, 1024, 5000)), rng.randrange(RECORD)
                runs = [Run(start, to, min(nbytes, bank.nbytes - start)), Run(0, 2 * RECORD, bank.nbytes)]
                expected = bytes_of(one, rig, gpu)
                for run in runs:
                    source = bank.array[run.source_offset : run.source_offset + run.nbytes]
                    expected[run.target_offset : run.target_offset + run.nbytes] = source
                rig.cuda.copies.clear()
                rig.device.copy(rng.choice(("demand", "background")), bank, memory, runs)
                assert np.array_equal(bytes_of(one, rig, gpu), expected)
                assert sum(n for _, _, n in rig.cuda.copies) == sum(run.nbytes for run in runs)
                base = bank.array.ctypes.data
                straight = sum(n for _, source, n in rig.cuda.copies if base <= source < base + bank.nbytes)
                pinned_nbytes = sum(max(0, min(r.nbytes, bank.pinned_nbytes - r.source_offset)) for r in runs)
                assert straight == (pinned_nbytes if buffers else sum(run.nbytes for run in runs))


def test_a_limit_is_used_up_by_ever_smaller_registrations_and_then_not_asked_again() -> None:
    """13 of 32 pages are 8 + 4 + 1; the next bank asks for nothing, and when the first is freed there is room again."""
    rig = Rig(FakeMachine(1))
    rig.cuda.pin_limit_nbytes = 13 * PAGE
    first = rig.device.allocate_bank("run", "bank", 32 * PAGE)
    assert first.pinned_nbytes == 13 * PAGE and sorted(n for n, _ in rig.cuda.registered.values()) == [
        PAGE,
        4 * PAGE,
        8 * PAGE,
    ]
    asked = rig.cuda.calls.count("cuMemHostRegister")
    second = rig.device.allocate_bank("run", "bank", PAGE)
    assert (second.pinned_nbytes, rig.cuda.calls.count("cuMemHostRegister")) == (0, asked)
    for bank in (first, second):
        bank.close()
    third = rig.device.allocate_bank("run", "bank", 5 * PAGE - 1)
    assert third.pinned_nbytes == 5 * PAGE - 1
    third.close()
    rig.close()


def test_buffers_that_cannot_be_pinned_are_asked_for_once(caplog: pytest.LogCaptureFixture) -> None:
    """However many banks there are: by the driver's calls, and by what is said."""
    with refusing(0, buffers=False) as (rig, _):
        rig.device.allocate_bank("run", "another", PAGE).close()
        assert rig.cuda.calls.count("cuMemHostAlloc") == 1
    assert sum("event=staging_unpinned" in record.message for record in caplog.records) == 1


def test_a_buffer_is_filled_again_only_when_it_has_been_copied_out_of() -> None:
    """While the GPU does nothing a copy of two buffers returns, one of three does not; then all of it is right."""
    with refusing(0) as (rig, bank), opened(rig) as (pool, theirs):
        rig.cuda.hold()
        rig.device.copy("demand", bank, theirs, [Run(0, 0, 2048)])
        longer = threading.Thread(target=rig.device.copy, args=("background", bank, theirs, [Run(2048, 2048, 5000)]))
        longer.start()
        longer.join(0.05)
        assert longer.is_alive() and not bytes_of(pool, rig).any()
        while longer.is_alive():
            rig.cuda.go_on()
        assert np.array_equal(bytes_of(pool, rig)[:7048], bank.array[:7048])
        made = rig.cuda.live["event"]
        rig.device.copy("demand", bank, theirs, [Run(0, 0, bank.nbytes)])
        assert rig.cuda.live["event"] == made  # events are used again


def test_a_flag_stands_behind_the_last_staged_byte() -> None:
    """In the stream's order: nothing of the record is missing once the flag is there, whenever one looks."""
    with refusing(0) as (rig, bank), opened(rig) as (pool, theirs):
        rig.cuda.hold()
        rig.device.copy("demand", bank, theirs, [Run(0, 4096, 2000)])
        rig.device.write_flag("demand", theirs, 0, LANDED)
        mark = rig.device.mark("demand", theirs)
        stream = next(stream for stream in rig.cuda.streams if stream.given)
        while stream.given:
            landed = content(pool, rig.workers[0])[0] == LANDED
            assert not landed or np.array_equal(bytes_of(pool, rig)[4096:6096], bank.array[:2000])
            stream.go_on()
        assert rig.device.is_done(mark) and content(pool, rig.workers[0])[0] == LANDED
        rig.cuda.go_on()


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("share", [0, 0.5])
def test_the_copy_loop_serves_from_such_a_bank(share: float, buffers: bool) -> None:
    """Queries of all kinds; then one whose copy is refused half-way, alone; and the figures leave it out."""
    with refusing(share, buffers) as (rig, bank):
        records = bank.array.reshape(EXPERTS, RECORD)
        copier = Copier(rig.device, background_depth=2, spin_us=1000, on_death=lambda: None)
        copier.start()
        served = Served(rig, copier, 0, bank)
        rng = random.Random(2)
        held: dict[int, int] = {}  # expert by slot
        for i in range(30):
            n = rng.randrange(EXPERTS + 1)
            experts, slots = sorted(rng.sample(range(EXPERTS), n)), sorted(rng.sample(range(SLOTS), n))
            held.update(zip(slots, experts, strict=True))
            served.worker.write_words(served.flags.address, 0, 16)
            served.put(i % 16, KINDS[i % 3], tuple(experts), tuple(slots))
            until(lambda i=i: served.flag(i % 16) == LANDED)  # type: ignore[misc]
            pool = bytes_of(served.pool, rig).reshape(SLOTS, RECORD)
            assert all(np.array_equal(pool[slot], records[expert]) for slot, expert in held.items())
        before = copier.stats().counters["stream"]
        rig.cuda.fails["cuMemcpyHtoDAsync"] = CUresult.CUDA_ERROR_INVALID_VALUE
        served.worker.write_words(served.flags.address, 0, 16)
        served.put(0, "stream", (EXPERTS - 1,), (0,))
        served.put(1, "stream", (EXPERTS - 2,), (1,))
        until(lambda: (served.flag(0), served.flag(1)) == (FAILED, LANDED))
        after = copier.stats().counters["stream"]
        assert after == CopyCounters(before.queries + 2, before.records + 1, before.nbytes + RECORD, 1)
        copier.stop()
        served.close()


def test_background_queries_of_such_a_bank_go_record_by_record() -> None:
    """Since starting one takes the loop's own time; from a bank that is pinned a whole stream query goes at once."""
    for share, issued in ((0, 1), (1, 3)):
        with refusing(share) as (rig, bank):
            copier = Copier(rig.device, background_depth=1, spin_us=1000, on_death=lambda: None)
            copier.start()
            served = Served(rig, copier, 0, bank)
            rig.cuda.hold()
            served.put(0, "stream", (1, 2, 3), (1, 2, 3))
            until(lambda copier=copier: copier.stats().counters["stream"].records > 0)  # type: ignore[misc]
            assert copier.stats().counters["stream"].records == issued
            while served.flag(0) != LANDED:
                rig.cuda.go_on()
            copier.stop()
            served.close()


def test_a_copy_that_is_refused_half_way_leaves_its_buffers_usable() -> None:
    with refusing(0) as (rig, bank), opened(rig) as (pool, theirs):
        rig.cuda.hold()
        rig.device.copy("demand", bank, theirs, [Run(0, 0, 1024)])
        rig.cuda.fails["cuMemcpyHtoDAsync"] = CUresult.CUDA_ERROR_INVALID_VALUE
        with pytest.raises(CopyFailed):
            rig.device.copy("demand", bank, theirs, [Run(1024, 1024, 2048)])
        rig.cuda.go_on()
        rig.device.copy("demand", bank, theirs, [Run(1024, 1024, 9000)])
        assert np.array_equal(bytes_of(pool, rig)[:10024], bank.array[:10024])
