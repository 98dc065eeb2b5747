"""The data plane on a GPU, between processes: against the checkpoint's own bytes, and against what was free before.

The worker's part is played by this process, which rings from the host; no torch but where a stream of its must wait.
"""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import zmq.asyncio
from msgspec.structs import replace

from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.random_model import Sizes, model_config, write_random_model
from copyengine.checkpoint.reader import read_experts
from copyengine.config import CopyEngineConfig
from copyengine.device import FAILED, LANDED, RELEASED
from copyengine.device.cuda_link import BATCH_RUN_NBYTES, BATCH_RUNS
from copyengine.device.cuda_worker import CudaWorkerDevice
from copyengine.device.probe import cuda_devices
from copyengine.protocol import LoadProgress, MemoryHandle
from copyengine.ring import CELLS, FLAG, KINDS, PAIRS, SEQUENCE, Kind, RingWriter
from copyengine.thread import CopyEngineThread
from copyengine.wire.errors import PeerError, SlotstreamError, WireError
from kernels.formats import RecordLayout, layout
from tests.copyengine.cuda_rig import CAPACITY, Connection, CudaEngine, CudaWorker, Download

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES = Sizes(
    layers=2, hidden=256, intermediate=256, experts=160, experts_per_token=2, heads=2, kv_heads=1, vocab_size=64
)
SLOTS, FLAGS = 200, 16
UNTOUCHED = 0xA5
GB = 10**9

Records = list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]]


@pytest.fixture(scope="module", autouse=True)
def gpus() -> int:
    found = len(cuda_devices())
    if not found:
        pytest.skip("no GPU")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory, SIZES)
    return str(directory)


@pytest.fixture(scope="module")
def record() -> RecordLayout:
    found = layout("bfloat16", SIZES.hidden, SIZES.intermediate)
    assert found.record_nbytes >= BATCH_RUN_NBYTES, "no batch would be made"
    return found


@pytest.fixture(scope="module")
def records(model: str, record: RecordLayout) -> Records:
    """[L] of [E, record_nbytes] uint8, as the checkpoint has them."""
    banks = [np.zeros((SIZES.experts, record.record_nbytes), np.uint8) for _ in range(SIZES.layers)]
    read_experts(open_model(model), record, banks, lambda _: None)
    return banks


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[CudaEngine]:
    with CudaEngine() as engine:
        engine.load(model)
        yield engine


@pytest.fixture
def worker(engine: CudaEngine, record: RecordLayout) -> Iterator[CudaWorker]:
    worker = CudaWorker("w", record.record_nbytes, SLOTS, FLAGS)
    worker.attach(engine)
    yield worker
    worker.writer.end_step()
    engine.run(engine.client.detach("w"))
    worker.close()


@pytest.fixture
def download(worker: CudaWorker) -> Iterator[Download]:
    download = Download(worker.device, worker.pool.nbytes)
    yield download
    download.close()


def check(worker: CudaWorker, download: Download, held: dict[int, np.ndarray[Any, Any]]) -> None:
    """Slots hold what `held` says, all others what the pool was filled with."""
    pool = download(worker.pool).reshape(worker.slots, worker.record_nbytes)
    rest = np.delete(pool, list(held), 0)
    assert (rest == UNTOUCHED).all()
    for slot, content in held.items():
        assert np.array_equal(pool[slot], content), f"slot {slot}"


# What lands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 2, BATCH_RUNS - 1, BATCH_RUNS, BATCH_RUNS + 1, 127, 128])
@pytest.mark.parametrize("where", ["neighbouring", "scattered", "two by two"])
def test_records_land_bit_for_bit(
    worker: CudaWorker, download: Download, records: Records, kind: Kind, n: int, where: str
) -> None:
    """The last layer's, at the end of bank and pool; as one run, as n, in pairs. One flag rises, and no other."""
    experts = range(SIZES.experts - n, SIZES.experts)
    slots = list(range(SLOTS - n, SLOTS))
    if where == "scattered":
        slots.reverse()
    elif where == "two by two":
        slots = [slot for first in reversed(range(0, n, 2)) for slot in slots[first : first + 2]]
    worker.fill_pool(UNTOUCHED)
    worker.put(5, kind, 1, experts, slots)
    assert worker.wait(5) == [LANDED]
    check(worker, download, {slot: records[1][expert] for expert, slot in zip(experts, slots, strict=True)})
    assert worker.flag_values() == [0] * 5 + [LANDED] + [0] * (FLAGS - 6)


def test_any_mixture_of_queries_lands(
    engine: CudaEngine, worker: CudaWorker, download: Download, records: Records
) -> None:
    """300 queries of all kinds, up to FLAGS at once, over slots of their own; the counters add up."""
    rng = random.Random(0)
    before = engine.run(engine.client.stats())
    held: dict[int, np.ndarray[Any, Any]] = {}
    free = list(range(SLOTS))
    underway: dict[int, list[int]] = {}  # slots by flag
    rung = 0
    worker.fill_pool(UNTOUCHED)
    for i in range(300):
        flag = i % FLAGS
        if flag in underway:
            assert worker.wait(flag) == [LANDED]
            free += underway.pop(flag)
        n = rng.choice([0, 1, 2, 3, 10])
        experts = sorted(rng.sample(range(SIZES.experts), n))
        rng.shuffle(free)
        slots, free = sorted(free[:n]), free[n:]
        layer = rng.randrange(SIZES.layers)
        held.update({slot: records[layer][expert] for expert, slot in zip(experts, slots, strict=True)})
        worker.put(flag, rng.choice(KINDS), layer, experts, slots)
        underway[flag] = slots
        rung += n
    assert set(worker.wait(*underway)) == {LANDED}
    check(worker, download, held)
    after = engine.run(engine.client.stats())
    copied = [getattr(after, kind).nbytes - getattr(before, kind).nbytes for kind in KINDS]
    assert sum(copied) == rung * worker.record_nbytes
    assert not any(getattr(after, kind).failed_queries for kind in KINDS) and after.malformed_records == 0


def test_a_record_that_makes_no_sense_fails_its_flag(engine: CudaEngine, worker: CudaWorker) -> None:
    worker.put(3, "demand", SIZES.layers, [0], [0])
    worker.put(4, "demand", 0, [0], [0])
    assert worker.wait(3, 4) == [FAILED, LANDED]


def test_a_ring_that_the_device_writes_is_read(worker: CudaWorker, download: Download, records: Records) -> None:
    """Word by word through the ring's device address, as the admission kernel does it, the sequence last."""
    driver, at = download.driver, worker.mapped.address + 4 * CELLS
    worker.fill_pool(UNTOUCHED)
    body = {FLAG: 7, FLAG + 1: KINDS.index("demand"), FLAG + 2: 1, FLAG + 3: 1, PAIRS: 42, PAIRS + 1: 99}
    for word, value in body.items():
        driver.write_word(at + 4 * word, value, download._stream)
    driver.write_word(at + 4 * SEQUENCE, 1, download._stream)
    assert worker.wait(7) == [LANDED]
    check(worker, download, {99: records[1][42]})


def test_banks_for_two_gpus_are_one(
    engine: CudaEngine, worker: CudaWorker, record: RecordLayout, records: Records, gpus: int
) -> None:
    """Pinned in the first GPU's context, copied to the second as well, both at once."""
    if gpus < 2:
        pytest.skip("one GPU")
    other = CudaWorker("other", record.record_nbytes, SLOTS, FLAGS, ordinal=1)
    other.attach(engine)
    both = (worker, other)
    for one in both:
        one.fill_pool(UNTOUCHED)
    for flag in range(FLAGS):
        for one in both:
            one.put(flag, KINDS[flag % 2], flag % 2, range(10), [flag * 10 + 9 - i for i in range(10)])
    for one in both:
        assert set(one.wait(*range(FLAGS))) == {LANDED}
        download = Download(one.device, one.pool.nbytes)
        held = {flag * 10 + 9 - i: records[flag % 2][i] for flag in range(FLAGS) for i in range(10)}
        check(one, download, held)
        download.close()
    engine.run(engine.client.detach("other"))
    other.close()


def test_the_copy_engine_as_a_thread_takes_plain_addresses(model: str, record: RecordLayout, records: Records) -> None:
    context = zmq.asyncio.Context()
    with CopyEngineThread(CopyEngineConfig(device="cuda", event_loop="selector"), context) as thread:
        engine = Connection(thread.endpoint, context)
        engine.load(model)
        worker = CudaWorker("w", record.record_nbytes, SLOTS, FLAGS, local=True)
        assert worker.pool.handle.kind == "cuda_local"
        worker.attach(engine)
        worker.fill_pool(UNTOUCHED)
        worker.put(0, "demand", 1, range(20), range(30, 50))
        worker.put(1, "stream", 0, range(20), range(120, 100, -1))
        assert worker.wait(0, 1) == [LANDED] * 2
        download = Download(worker.device, worker.pool.nbytes)
        ones = {30 + i: records[1][i] for i in range(20)}
        check(worker, download, ones | {120 - i: records[0][i] for i in range(20)})
        download.close()
        engine.run(engine.client.detach("w"))
        worker.close()
        engine.close()
    context.term()


# Who waits ----------------------------------------------------------------------------------------------------------


def on_device(address: int, nbytes: int) -> Any:
    """Device memory as a tensor [nbytes] uint8."""
    import torch

    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")


@pytest.mark.parametrize("captured", [False, True])
def test_a_stream_waits_for_a_flag_and_then_sees_the_record(
    worker: CudaWorker, records: Records, captured: bool
) -> None:
    """Three times over; as a graph, too, whose nodes wait for the same flag each time."""
    torch = pytest.importorskip("torch")
    pool = on_device(worker.pool.address, worker.pool.nbytes).view(SLOTS, -1)
    seen = torch.zeros_like(pool[0])
    stream = torch.cuda.Stream()

    def wait_and_look() -> None:
        worker.device.wait_flag(torch.cuda.current_stream().cuda_stream, worker.flag_address(2))
        seen.copy_(pool[7])

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        if captured:
            with torch.cuda.graph(graph, stream=stream):
                wait_and_look()
        for expert in (3, 100, 159):
            worker.device.write_words(worker.flag_address(2), 0, 1)
            graph.replay() if captured else wait_and_look()
            time.sleep(0.02)
            assert not stream.query(), "it did not wait"
            worker.put(2, "demand", 1, [expert], [7])
            stream.synchronize()
            assert np.array_equal(seen.cpu().numpy(), records[1][expert])


@pytest.mark.timeout(60)
def test_words_are_written_while_streams_wait(worker: CudaWorker) -> None:
    """What releases streams that wait must not stand behind them. And while another thread captures a graph, which it
    does not break.
    """
    torch = pytest.importorskip("torch")
    out = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    streams = [torch.cuda.Stream() for _ in range(4)]
    free = torch.cuda.Stream(priority=-1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # all that is needed is loaded before anything waits
        out.add_(1)
    out.add_(1).zero_()
    torch.cuda.synchronize()
    worker.device.write_words(worker.flags.address, 0, FLAGS)
    for i, stream in enumerate(streams):
        worker.device.wait_flag(stream.cuda_stream, worker.flag_address(i % FLAGS))
    time.sleep(0.02)
    assert not any(stream.query() for stream in streams)
    took: list[float] = []

    def release() -> None:
        start = time.monotonic()
        assert worker.flag_values() == [0] * FLAGS
        worker.device.write_words(worker.flags.address, RELEASED, FLAGS)
        took.append(time.monotonic() - start)

    with torch.cuda.stream(free):
        graph.capture_begin()  # torch.cuda.graph would wait for the streams
        out.add_(1)
        thread = threading.Thread(target=release)
        thread.start()
        thread.join(10)
        out.add_(1)
        graph.capture_end()
    assert took and took[0] < 1, "the words stood behind the streams that wait for them"
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [2.0] * 8


# Who dies -----------------------------------------------------------------------------------------------------------


def settled(read: Callable[[], int], least: int, within_s: float = 20) -> int:
    """What `read` returns once it is at least `least`, or at the end of the time."""
    end = time.monotonic() + within_s
    while (value := int(read())) < least and time.monotonic() < end:
        time.sleep(0.1)
    return value


SLACK_NBYTES = 64 << 20
"""What the driver or the system may keep for itself."""


def test_a_killed_copy_engine_gives_everything_back(tmp_path: Path, record: RecordLayout) -> None:
    """1 GB pinned and a worker attached: afterwards the GPU has as much free as before, and the host too. The worker
    that it leaves behind can release its flags, use its pool and serve a next one.
    """
    layers = GB // (SIZES.experts * record.record_nbytes)
    (tmp_path / "config.json").write_text(json.dumps(model_config(replace(SIZES, layers=layers))))
    worker = CudaWorker("w", record.record_nbytes, SLOTS, FLAGS)
    worker.device._gpu.enter()
    driver = worker.device._driver
    gpu_before, host_before = driver.memory()[0], psutil.virtual_memory().available
    for _ in range(2):
        engine = CudaEngine()
        progress: list[LoadProgress] = []
        loaded = engine.load(str(tmp_path), progress.append, load_format="dummy")
        assert loaded.bank_nbytes == layers * SIZES.experts * record.record_nbytes
        assert {p.phase for p in progress} >= {"made-up experts"}
        worker.attach(engine)
        worker.put(0, "demand", layers - 1, range(128), range(128))
        assert worker.wait(0) == [LANDED]
        assert psutil.virtual_memory().available < host_before - loaded.bank_nbytes // 2
        for flag in range(1, 9):  # copies are under way when it dies
            worker.put(flag, "stream", 0, range(128), range(128))
        engine.kill()
        worker.writer.end_step()
        worker.device.write_words(worker.flags.address, RELEASED, FLAGS)
        assert worker.flag_values() == [RELEASED] * FLAGS
        assert settled(lambda: driver.memory()[0], gpu_before - SLACK_NBYTES) >= gpu_before - SLACK_NBYTES
        least = host_before - 4 * SLACK_NBYTES
        assert settled(lambda: psutil.virtual_memory().available, least) >= least
        engine.close()
        worker.fill_pool(UNTOUCHED)
        worker.writer = RingWriter(worker.ring.array, CAPACITY)
    worker.close()


VICTIM = """
import sys
from tests.copyengine.cuda_rig import Connection, CudaWorker
engine = Connection(sys.argv[1])
worker = CudaWorker("victim", int(sys.argv[2]), 200, 16)
worker.attach(engine)
worker.put(0, "demand", 0, range(128), range(128))
worker.wait(0)
print("copying", flush=True)
flag = 0
while True:
    flag = (flag + 1) % 16
    worker.put(flag, "stream", 0, range(128), range(128))
"""


def test_a_killed_worker_leaves_the_copy_engine_alive_and_its_memory_is_given_back(
    engine: CudaEngine, worker: CudaWorker, download: Download, records: Records
) -> None:
    """It dies while its pool is copied to. The next worker of its name is served, and others are all the time."""
    driver = download.driver
    before = driver.memory()[0]
    for _ in range(2):
        endpoint = engine.client._rpc.endpoint
        arguments = [sys.executable, "-c", VICTIM, endpoint, str(worker.record_nbytes)]
        victim = subprocess.Popen(arguments, stdout=subprocess.PIPE)
        assert victim.stdout is not None and victim.stdout.readline() == b"copying\n"
        time.sleep(0.1)
        victim.kill()
        victim.communicate()
        worker.fill_pool(UNTOUCHED)
        worker.put(0, "demand", 1, [3], [4])
        assert worker.wait(0) == [LANDED]
        check(worker, download, {4: records[1][3]})
    engine.run(engine.client.detach("victim"))
    least = before - SLACK_NBYTES
    assert settled(lambda: driver.memory()[0], least) >= least
    assert engine.popen.poll() is None and engine.run(engine.client.stats()).workers == ["w"]


def test_attaching_and_detaching_leaves_nothing_mapped(engine: CudaEngine, record: RecordLayout) -> None:
    """Ten times 1 GB: the memory is free again each time, which it is not while somebody has it mapped."""
    device = CudaWorkerDevice(0, False)
    free: list[int] = []
    for _ in range(10):
        worker = CudaWorker("guest", record.record_nbytes, GB // record.record_nbytes, FLAGS)
        worker.attach(engine)
        worker.put(0, "demand", 0, [0], [worker.slots - 1])
        assert worker.wait(0) == [LANDED]
        engine.run(engine.client.detach("guest"))
        worker.close()
        device._gpu.enter()
        free.append(device._driver.memory()[0])
    device.close()
    assert max(free) - min(free) < SLACK_NBYTES


def test_a_detach_fails_what_is_not_copied(engine: CudaEngine, record: RecordLayout) -> None:
    """Many queries, then a detach: each flag says one thing or the other, and none is left to be waited for."""
    worker = CudaWorker("guest", record.record_nbytes, SLOTS, FLAGS)
    worker.attach(engine)
    for flag in range(FLAGS):
        worker.put(flag, "stream", 0, range(128), range(128))
    engine.run(engine.client.detach("guest"))
    assert set(worker.flag_values()) <= {LANDED, FAILED}
    worker.close()


def test_memory_that_is_no_use_is_refused(engine: CudaEngine, worker: CudaWorker) -> None:
    """Addresses of another process, lengths beyond the allocation, a GPU that is not here, memory that is freed."""
    good = worker.request
    gone = worker.device.allocate(1 << 20)
    gone.close()
    pools: list[tuple[MemoryHandle, type[SlotstreamError]]] = [
        (MemoryHandle("cuda_local", f"{worker.pool.address:x}", good.pool.nbytes, good.pool.device), WireError),
        (MemoryHandle("cuda_ipc", good.pool.name, good.pool.nbytes + (4 << 20), good.pool.device), WireError),
        (MemoryHandle("cuda_ipc", good.pool.name, good.pool.nbytes, "0000:99:00.0"), WireError),
        (MemoryHandle("cuda_ipc", "00" * 64, good.pool.nbytes, good.pool.device), PeerError),
        (MemoryHandle("cuda_ipc", gone.handle.name, good.pool.nbytes, good.pool.device), SlotstreamError),
    ]
    for pool, error in pools:
        request = replace(good, worker="other", pool=pool)
        with pytest.raises(error):
            engine.run(engine.client.attach(request))
    assert engine.run(engine.client.stats()).workers == ["w"]


# What is found ------------------------------------------------------------------------------------------------------


def test_the_probe_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    for facts in cuda_devices():
        properties = torch.cuda.get_device_properties(facts.ordinal)
        assert (facts.name, facts.capability) == (properties.name, (properties.major, properties.minor))
        free, total = torch.cuda.mem_get_info(facts.ordinal)
        assert facts.total_nbytes == total and abs(facts.free_nbytes - free) < GB
        assert facts.ipc
