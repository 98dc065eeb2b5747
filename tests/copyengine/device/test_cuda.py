"""The copy engine's side of the CUDA backend over a driver in Python: what lands, and that everything is given back.

Against a GPU: tests/copyengine/test_cuda.py.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from copyengine.copier import Attachment, Copier
from copyengine.device import LANDED, Bank, Run
from copyengine.device.cuda import CudaCopyDevice, CudaMemory
from copyengine.device.cuda_driver import CudaError
from copyengine.device.cuda_gpu import Gpu, check_ordinal
from copyengine.device.cuda_link import BATCH_RUN_NBYTES, BATCH_RUNS
from copyengine.device.cuda_worker import CudaWorkerDevice, DeviceMemory
from copyengine.device.host import create_segment
from copyengine.device.pinned import Pinning
from copyengine.protocol import CopyCounters, MemoryHandle
from copyengine.ring import CopyQuery, Kind, Limits, RingReader, RingWriter, ring_nbytes
from copyengine.wire.errors import ConfigError, CopyFailed, PeerDied, WireError
from tests.copyengine.device.fake_cuda import CUresult, FakeCuda, FakeMachine
from tests.copyengine.test_copier import until


class Rig:
    """A worker's process on each GPU, and the copy engine's."""

    def __init__(self, machine: FakeMachine, local: bool = False) -> None:
        self.machine = machine
        self.cuda = FakeCuda(machine)
        self.device = CudaCopyDevice(0, local, self.cuda.driver())
        self.processes = [self.cuda if local else FakeCuda(machine) for _ in machine.gpus]
        self.workers = [CudaWorkerDevice(i, local, p.driver()) for i, p in enumerate(self.processes)]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.device.close()
        assert [+process.live for process in (self.cuda, *self.processes)] == [{}] * (1 + len(self.processes))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(FakeMachine())
    yield rig
    rig.close()


def content(memory: DeviceMemory, worker: CudaWorkerDevice) -> list[int]:
    """Its 32-bit words."""
    return worker.read_words(memory.address, memory.nbytes // 4)


@pytest.mark.parametrize("local", [False, True])
def test_two_gpus_copy_from_one_bank(local: bool) -> None:
    """Each word of the bank is its number; what was not copied to is zero, as it was allocated."""
    rig = Rig(FakeMachine(), local)
    told: list[int] = []
    bank = rig.device.allocate_bank("run", "bank", 4 * 10, told.append)
    assert (bank.nbytes, bank.array.nbytes, told) == (40, 40, [40])
    bank.array.view(np.uint32)[:] = np.arange(1, 11)
    for worker in rig.workers:
        pool, flags = worker.allocate(4 * 12), worker.allocate(4 * 3)
        theirs = [rig.device.open(memory.handle) for memory in (pool, flags)]
        rig.device.copy("demand", bank, theirs[0], [Run(0, 8, 8), Run(36, 44, 4)])
        rig.device.write_flag("demand", theirs[1], 2, LANDED)
        assert rig.device.is_done(rig.device.mark("demand", theirs[0]))
        assert content(pool, worker) == [0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 10]
        assert content(flags, worker) == [0, 0, LANDED]
        memories: list[DeviceMemory | CudaMemory] = [*theirs, pool, flags]
        for memory in memories:
            memory.close()
            memory.close()
            assert memory.nbytes == 0
    bank.close()
    bank.close()
    rig.close()


@pytest.mark.parametrize("runs", [1, BATCH_RUNS - 1, BATCH_RUNS, 128])
@pytest.mark.parametrize("nbytes", [BATCH_RUN_NBYTES - 4, BATCH_RUN_NBYTES])
@pytest.mark.parametrize("version", [12080, 13000])
def test_many_long_runs_are_one_call_but_for_the_first(runs: int, nbytes: int, version: int) -> None:
    """Where the driver has it; and they land all the same."""
    cuda = FakeCuda(FakeMachine(gpus=1, gpu_nbytes=1 << 30), version)
    device = CudaCopyDevice(0, True, cuda.driver())
    worker = CudaWorkerDevice(0, True, cuda.driver())
    bank = device.allocate_bank("run", "bank", runs * nbytes)
    bank.array.view(np.uint32)[:] = np.arange(runs * nbytes // 4)
    pool = worker.allocate(runs * nbytes)
    theirs = device.open(pool.handle)
    device.copy("background", bank, theirs, [Run(i * nbytes, (runs - 1 - i) * nbytes, nbytes) for i in range(runs)])
    expected = bank.array.reshape(runs, nbytes)[::-1].reshape(-1)
    landed = np.frombuffer(cuda.machine.buffers[pool.address][1], np.uint8, runs * nbytes)
    assert np.array_equal(landed, expected)
    batched = runs >= BATCH_RUNS and nbytes >= BATCH_RUN_NBYTES and version >= 13000
    assert cuda.calls.count("cuMemcpyBatchAsync") == batched
    assert cuda.calls.count("cuMemcpyHtoDAsync") == (1 if batched else runs)
    for memory in (theirs, pool, bank, worker, device):
        memory.close()
    assert not +cuda.live


def test_a_stream_keeps_its_order_and_a_mark_tells_when_it_is_through(rig: Rig) -> None:
    """Nothing lands while the streams are held; a mark on the other stream has nothing to wait for afterwards."""
    bank = rig.device.allocate_bank("run", "bank", 8)
    bank.array.view(np.uint32)[:] = (7, 8)
    pool = rig.workers[0].allocate(16)
    theirs = rig.device.open(pool.handle)
    rig.cuda.hold()
    rig.device.copy("demand", bank, theirs, [Run(0, 0, 4)])
    rig.device.write_flag("demand", theirs, 1, LANDED)
    marks = [rig.device.mark("demand", theirs), rig.device.mark("background", theirs)]
    assert content(pool, rig.workers[0]) == [0] * 4 and not any(map(rig.device.is_done, marks))
    rig.cuda.go_on()
    assert content(pool, rig.workers[0]) == [7, LANDED, 0, 0] and all(map(rig.device.is_done, marks))
    made = rig.cuda.live["event"]
    for _ in range(5):
        assert rig.device.is_done(rig.device.mark("demand", theirs))
    assert rig.cuda.live["event"] == made  # events are used again
    for memory in (theirs, pool, bank):
        memory.close()


def test_what_lies_outside_is_not_started(rig: Rig) -> None:
    """Not even the runs before it; nor anything once the pool is closed."""
    bank = rig.device.allocate_bank("run", "bank", 8)
    pool = rig.workers[0].allocate(16)
    theirs = rig.device.open(pool.handle)
    for run in (Run(0, 12, 8), Run(4, 0, 8)):
        with pytest.raises(CopyFailed, match="outside"):
            rig.device.copy("demand", bank, theirs, [Run(0, 0, 4), run])
    theirs.close()
    with pytest.raises(CopyFailed, match="outside"):
        rig.device.copy("demand", bank, theirs, [Run(0, 0, 4)])
    assert rig.cuda.copies == []
    pool.close()
    bank.close()


def test_a_gpu_without_stream_operations_gets_its_flags_all_the_same() -> None:
    rig = Rig(FakeMachine(gpus=1, stream_operations=False))
    assert not rig.workers[0].has_stream_waits
    flags = rig.workers[0].allocate(8)
    theirs = rig.device.open(flags.handle)
    rig.device.write_flag("background", theirs, 1, LANDED)
    assert content(flags, rig.workers[0]) == [0, LANDED] and "cuStreamWriteValue32" not in rig.cuda.calls
    theirs.close()
    flags.close()
    rig.close()


# What cannot be -----------------------------------------------------------------------------------------------------


def test_handles_that_are_not_what_they_say_are_refused(rig: Rig) -> None:
    """In kind, digits, length, GPU; a plain address is taken from this process alone. Nothing stays mapped."""
    pool = rig.workers[0].allocate(16)
    good = pool.handle
    wrong = [
        MemoryHandle("shm", "x", 16, good.device),
        MemoryHandle("cuda_local", f"{pool.address:x}", 16, good.device),
        MemoryHandle("cuda_ipc", "xyz", 16, good.device),
        MemoryHandle("cuda_ipc", "00", 16, good.device),
        MemoryHandle("cuda_ipc", good.name, (2 << 20) + 1, good.device),
        MemoryHandle("cuda_ipc", good.name, 16, "0000:99:00.0"),
        MemoryHandle("cuda_ipc", good.name, 16, ""),
    ]
    for handle in wrong:
        with pytest.raises(WireError):
            rig.device.open(handle)
    assert not rig.cuda.live["mapping"]
    pool.close()
    local = CudaCopyDevice(0, True, rig.cuda.driver())
    for name in ("xyz", "10"):
        with pytest.raises(WireError):
            local.open(MemoryHandle("cuda_local", name, 16, good.device))
    local.close()


def test_memory_of_a_worker_that_is_gone_is_a_dead_peer(rig: Rig) -> None:
    pool = rig.workers[1].allocate(16)
    pool.close()
    with pytest.raises(PeerDied, match=r"cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE.*--copy-engine thread"):
        rig.device.open(pool.handle)


def test_memory_opened_twice_is_closed_twice(rig: Rig) -> None:
    """As when a worker attaches anew before its last attachment is gone: the driver counts."""
    pool = rig.workers[1].allocate(16)
    first, second = rig.device.open(pool.handle), rig.device.open(pool.handle)
    first.close()
    assert rig.cuda.live["mapping"] == 1
    rig.device.write_flag("demand", second, 0, LANDED)
    assert content(pool, rig.workers[1])[0] == LANDED
    second.close()
    pool.close()


def test_too_little_host_memory_is_a_config_error(rig: Rig) -> None:
    """More than the address space has."""
    with pytest.raises(ConfigError, match=rf"no {1 << 62} bytes.*bank7"):
        rig.device.allocate_bank("run", "bank7", 1 << 62)


def test_a_gpu_that_is_broken_pins_nothing_and_keeps_nothing(rig: Rig) -> None:
    """It is not taken for a system that refuses."""
    rig.cuda.fails["cuMemHostRegister"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="cuMemHostRegister: CUDA_ERROR_ILLEGAL_ADDRESS"):
        rig.device.allocate_bank("run", "bank7", 12345)
    assert not rig.cuda.live["registration"]


def test_a_bank_is_freed_if_nobody_wants_it_any_more(rig: Rig) -> None:
    def stop(_: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError):
        rig.device.allocate_bank("run", "bank", 100, stop)
    assert "cuMemHostRegister" in rig.cuda.calls and not rig.cuda.live["registration"]


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 << 20])
def test_a_registered_bank_has_exactly_its_bytes(rig: Rig, nbytes: int) -> None:
    """Zeroed, at its address, pinned in whole pages; views outlive it."""
    gpu = Gpu(rig.cuda.driver(), 0)
    bank = Pinning(gpu.driver, gpu.enter).bank(nbytes, 3)
    assert bank.array.shape == (nbytes,) == (bank.nbytes,) and not bank.array.any()
    assert bank.array.ctypes.data == bank.address and rig.cuda.live["registration"] == 1
    view = bank.array[-1:]
    view[0] = 9
    bank.close()
    assert view.tolist() == [9] and bank.array.size == 0 and not rig.cuda.live["registration"]
    gpu.close()


def test_any_thread_may_close_a_bank(rig: Rig) -> None:
    """One without a context, as the event loop's: the fake driver refuses to unpin there. And one that is on another
    GPU, which goes on there."""
    one, two = (rig.device.allocate_bank("run", "bank", 8) for _ in range(2))
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(one.close).result(10)
    assert rig.cuda.live["registration"] == 1
    pool = rig.workers[1].allocate(8)
    theirs = rig.device.open(pool.handle)
    two.close()
    assert not rig.cuda.live["registration"] and rig.cuda.thread.gpu == 0
    rig.device.write_flag("demand", theirs, 1, LANDED)
    assert rig.cuda.thread.gpu == 1 and content(pool, rig.workers[1]) == [0, LANDED]
    theirs.close()
    pool.close()


def test_no_such_gpu_is_a_config_error() -> None:
    """Both sides say the same, in words that name the flags of either; the last one that there is will do."""
    driver = FakeCuda(FakeMachine(gpus=2)).driver()
    uses: list[Callable[[int], object]] = [
        lambda ordinal: check_ordinal(driver, ordinal),
        lambda ordinal: CudaCopyDevice(ordinal, False, driver).close(),
        lambda ordinal: CudaWorkerDevice(ordinal, False, driver).close(),
    ]
    for use in uses:
        use(1)
        with pytest.raises(ConfigError, match=r"^--device cuda --ordinal 2: the number of GPUs here is 2, the first"):
            use(2)


@pytest.mark.parametrize("call", ["cuCtxSetCurrent", "cuStreamCreateWithPriority", "cuCtxGetStreamPriorityRange"])
def test_a_gpu_that_cannot_be_taken_into_use_is_given_back(call: str) -> None:
    cuda = FakeCuda(FakeMachine())
    device = CudaCopyDevice(0, False, cuda.driver())
    cuda.fails[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CudaError, match=call):
        device.allocate_bank("run", "bank", 8)
    assert not +cuda.live
    device.allocate_bank("run", "bank", 8).close()
    device.close()
    assert not +cuda.live


def test_a_gpu_that_fails_at_the_first_use_leaves_the_thread_with_the_other(rig: Rig) -> None:
    """Its context had been entered already: what comes next must not happen there."""
    pools = [worker.allocate(8) for worker in rig.workers]
    first = rig.device.open(pools[0].handle)
    rig.cuda.fails["cuStreamCreateWithPriority"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CudaError):
        rig.device.open(pools[1].handle)
    rig.device.write_flag("demand", first, 0, LANDED)
    assert rig.cuda.thread.gpu == 0 and rig.cuda.live["context 1"] == 0
    first.close()
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuMemcpyBatchAsync"])
def test_a_copy_that_is_refused_fails_alone_and_a_broken_gpu_ends_all(rig: Rig, call: str) -> None:
    bank = rig.device.allocate_bank("run", "bank", BATCH_RUN_NBYTES)
    pool = rig.workers[0].allocate(BATCH_RUN_NBYTES)
    theirs = rig.device.open(pool.handle)
    runs = [Run(0, 0, BATCH_RUN_NBYTES)] * (BATCH_RUNS if "Batch" in call else 1)
    rig.cuda.fails[call] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CopyFailed, match=call):
        rig.device.copy("demand", bank, theirs, runs)
    mark = rig.device.mark("demand", theirs)
    rig.cuda.fails[call] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match=call):
        rig.device.copy("demand", bank, theirs, runs)
    rig.cuda.broken = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    uses: list[Callable[[], object]] = [
        lambda: rig.device.is_done(mark),
        lambda: rig.device.mark("demand", theirs),
        lambda: rig.device.write_flag("demand", theirs, 0, LANDED),
    ]
    for use in uses:
        with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
            use()
    rig.cuda.broken = CUresult.CUDA_SUCCESS
    rig.device.is_done(mark)
    rig.device.is_done(rig.device.mark("demand", theirs))
    for memory in (theirs, pool, bank):
        memory.close()


# With the copy loop -------------------------------------------------------------------------------------------------

EXPERTS, SLOTS, RECORD = 6, 8, 64


class Served:
    """A worker on a GPU, attached to a copier."""

    def __init__(self, rig: Rig, copier: Copier, gpu: int, bank: Bank) -> None:
        self.worker = rig.workers[gpu]
        self.pool, self.flags = self.worker.allocate(SLOTS * RECORD), self.worker.allocate(4 * 16)
        self.ring = create_segment("test", "ring", ring_nbytes(16))
        self.mapped = self.worker.map_ring(self.ring)
        self.writer = RingWriter(self.ring.array, 16)
        pool, flags = rig.device.open(self.pool.handle), rig.device.open(self.flags.handle)
        reader = RingReader(self.ring.array, Limits(1, EXPERTS, SLOTS, 16))
        copier.attach(Attachment(f"w{gpu}", [bank], RECORD, pool, flags, self.ring, reader)).result(10)
        self.writer.begin_step()
        copier.wake()

    def put(self, flag: int, kind: Kind, experts: tuple[int, ...], slots: tuple[int, ...]) -> None:
        assert self.writer.try_put(CopyQuery(flag, kind, 0, experts, slots))

    def flag(self, index: int) -> int:
        return content(self.flags, self.worker)[index]

    def close(self) -> None:
        self.mapped.close()
        for memory in (self.pool, self.flags):
            memory.close()


def test_a_copier_serves_two_gpus_from_one_bank(rig: Rig) -> None:
    """Records of one byte value each; then one of them is stopped with its streams held, which may unmap nothing."""
    bank = rig.device.allocate_bank("run", "bank", EXPERTS * RECORD)
    bank.array.reshape(EXPERTS, RECORD)[:] = np.arange(EXPERTS, dtype=np.uint8)[:, None]
    copier = Copier(rig.device, background_depth=2, spin_us=1000, on_death=lambda: None)
    copier.start()
    served = [Served(rig, copier, gpu, bank) for gpu in range(2)]
    for i, one in enumerate(served):
        one.put(0, "demand", (0, 1, 5), (7, 2, 3 + i))
        one.put(1, "stream", (2, 3, 4), (0, 1, 6))
        until(lambda one=one: one.flag(0) == one.flag(1) == LANDED)  # type: ignore[misc]
        pool = np.array(content(one.pool, one.worker), np.uint32).view(np.uint8).reshape(SLOTS, RECORD)
        slots = [7, 2, 3 + i, 0, 1, 6]
        assert [set(row) for row in pool[slots].tolist()] == [{e} for e in (0, 1, 5, 2, 3, 4)]
        assert not np.delete(pool, slots, 0).any()
    assert copier.stats().counters["stream"] == CopyCounters(2, 6, 6 * RECORD, 0)
    rig.cuda.hold()
    served[0].put(2, "demand", (1,), (1,))
    until(lambda: copier.stats().counters["demand"].queries == 3)
    stopped = threading.Thread(target=copier.stop)
    stopped.start()
    stopped.join(0.05)
    assert stopped.is_alive() and rig.cuda.live["mapping"] == 4
    rig.cuda.go_on()
    stopped.join(10)
    assert not rig.cuda.live["mapping"]
    for one in served:
        one.close()
    bank.close()


def test_a_broken_gpu_ends_the_copy_loop(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    dead = threading.Event()
    bank = rig.device.allocate_bank("run", "bank", EXPERTS * RECORD)
    copier = Copier(rig.device, background_depth=2, spin_us=1000, on_death=dead.set)
    copier.start()
    served = Served(rig, copier, 0, bank)
    rig.cuda.broken = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    served.put(0, "demand", (0,), (0,))
    assert dead.wait(10) and "ILLEGAL_ADDRESS" in caplog.text
    rig.cuda.broken = CUresult.CUDA_SUCCESS
    copier.stop()
    copier._attached["w0"].close()
    served.close()
    bank.close()


def test_the_link_of_a_mapping_is_its_gpu(rig: Rig) -> None:
    for gpu, worker in zip(rig.machine.gpus, rig.workers, strict=True):
        pool = worker.allocate(1)
        theirs = rig.device.open(pool.handle)
        assert isinstance(theirs, CudaMemory) and theirs.handle.device == worker.link == gpu.bus_id
        theirs.close()
        pool.close()
