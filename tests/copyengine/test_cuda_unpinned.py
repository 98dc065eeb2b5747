"""Host memory that the system refuses to pin, on a GPU: all lands as if it were pinned, and it is said how much is not.

Over a driver in Python: tests/copyengine/device/test_staging.py.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from copyengine.device import LANDED
from copyengine.device.probe import cuda_devices
from copyengine.ring import KINDS
from kernels.formats import RecordLayout
from tests.copyengine.cuda_rig import CudaEngine, CudaWorker, Download
from tests.copyengine.test_cuda import FLAGS, SIZES, SLOTS, UNTOUCHED, Records, check, model, record, records

__all__ = ["model", "record", "records"]  # fixtures

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

REFUSING = """
import sys, threading
from copyengine.device.cuda_driver import CudaError, Driver
from copyengine.__main__ import main
left, buffers = int(sys.argv.pop(1)), sys.argv.pop(1) == "buffers"
register, allocate, lock = Driver.register_host, Driver.allocate_host, threading.Lock()

def refusing_register(self, address, nbytes, *flags):
    global left
    with lock:
        if nbytes > left:
            raise CudaError("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")
        left -= nbytes
    register(self, address, nbytes, *flags)

def refusing_allocate(self, nbytes):
    if not buffers:
        raise CudaError("cuMemHostAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    return allocate(self, nbytes)

Driver.register_host, Driver.allocate_host = refusing_register, refusing_allocate
sys.exit(main())
"""


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    if not cuda_devices():
        pytest.skip("no GPU")


@pytest.fixture(params=[0, 30, 50, 100])
def percent(request: pytest.FixtureRequest) -> int:
    """What may be pinned of all banks: nothing, half a bank, one of the two, both."""
    return int(request.param)


@pytest.fixture(params=["buffers", "no buffers"])
def engine(model: str, record: RecordLayout, percent: int, request: pytest.FixtureRequest) -> Iterator[CudaEngine]:
    banks = SIZES.layers * SIZES.experts * record.record_nbytes
    with CudaEngine(start=("-c", REFUSING, str(banks * percent // 100), request.param)) as engine:
        loaded = engine.load(model)
        assert loaded.bank_nbytes == banks
        stats = engine.run(engine.client.stats())
        assert stats.pinned_nbytes == loaded.pinned_nbytes == banks - stats.pageable_nbytes
        assert (stats.pinned_nbytes > 0, stats.pageable_nbytes > 0) == (percent > 0, percent < 100)
        yield engine


def test_any_mixture_of_queries_lands_bit_for_bit(engine: CudaEngine, percent: int, records: Records) -> None:
    """Every record once, neighbours among them; then 100 queries of all kinds at once, each into slots of its own."""
    worker = CudaWorker("w", records[0].shape[1], SLOTS, FLAGS)
    worker.attach(engine)
    download = Download(worker.device, worker.pool.nbytes)
    for layer in range(SIZES.layers):
        for first in range(0, SIZES.experts, 80):
            worker.fill_pool(UNTOUCHED)
            worker.put(0, KINDS[layer], layer, range(first, first + 80), range(100, 180))
            assert worker.wait(0) == [LANDED]
            check(worker, download, {100 + i: records[layer][first + i] for i in range(80)})
    rng = random.Random(percent)
    worker.fill_pool(UNTOUCHED)
    held: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
    for i in range(100):
        flag = i % 10
        if i >= 10:
            assert worker.wait(flag) == [LANDED]
        layer, experts = rng.randrange(SIZES.layers), sorted(rng.sample(range(SIZES.experts), rng.randrange(1, 20)))
        slots = sorted(rng.sample(range(20 * flag, 20 * flag + 20), len(experts)))
        held.update({slot: records[layer][expert] for expert, slot in zip(experts, slots, strict=True)})
        worker.put(flag, KINDS[i % 3], layer, experts, slots)
    assert set(worker.wait(*range(10))) == {LANDED}
    check(worker, download, held)
    stats = engine.run(engine.client.stats())
    assert not any(getattr(stats, kind).failed_queries for kind in KINDS)
    download.close()
    worker.writer.end_step()
    engine.run(engine.client.detach("w"))
    worker.close()
