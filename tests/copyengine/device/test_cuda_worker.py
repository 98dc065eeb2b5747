"""The worker's side of the CUDA backend over a driver in Python. Against a GPU: tests/copyengine/test_cuda.py."""

import threading

import pytest

from copyengine.device.cuda_driver import CudaError
from copyengine.device.cuda_worker import BLOCK_NBYTES, WORDS, CudaWorkerDevice
from copyengine.device.host import create_segment
from copyengine.wire.errors import ConfigError
from tests.copyengine.device.fake_cuda import CUresult, FakeCuda, FakeMachine


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(FakeMachine())


@pytest.mark.parametrize("nbytes", [1, 4, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1])
@pytest.mark.parametrize("local", [False, True])
def test_memory_is_zeroed_has_blocks_of_its_own_and_is_given_back(cuda: FakeCuda, nbytes: int, local: bool) -> None:
    """The driver exports whole blocks, so nobody else's memory may be in ours."""
    device = CudaWorkerDevice(1, local, cuda.driver())
    told: list[int] = []
    memory = device.allocate(nbytes, told.append)
    gpu, buffer = cuda.machine.buffers[memory.address]
    assert gpu == 1 and len(buffer) % BLOCK_NBYTES == 0 and not any(bytes(buffer))
    assert (memory.nbytes, memory.handle.nbytes, told) == (nbytes, nbytes, [nbytes])
    assert memory.handle.device == device.link == "0000:02:00.0"
    if local:
        assert (memory.handle.kind, int(memory.handle.name, 16)) == ("cuda_local", memory.address)
    else:
        assert cuda.machine.exports[bytes.fromhex(memory.handle.name)] == memory.address
    memory.close()
    memory.close()
    device.close()
    assert not +cuda.live


def test_too_little_memory_is_a_config_error_with_figures(cuda: FakeCuda) -> None:
    device = CudaWorkerDevice(0, False, cuda.driver())
    with pytest.raises(
        ConfigError, match=r"99999999 bytes.*cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY; 67108864 of 67108864"
    ):
        device.allocate(99_999_999)
    device.close()
    assert not +cuda.live


def test_an_allocation_that_fails_halfway_leaves_nothing(cuda: FakeCuda) -> None:
    """Zeroing it, exporting it (which names the other way), and somebody who has enough."""
    device = CudaWorkerDevice(0, False, cuda.driver())
    cuda.fails["cuMemsetD32Async"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CudaError, match="cuMemsetD32Async"):
        device.allocate(8)
    cuda.no_ipc = True
    with pytest.raises(ConfigError, match="CUDA_ERROR_NOT_SUPPORTED; use --copy-engine thread"):
        device.allocate(8)
    cuda.no_ipc = False

    def stop(_: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError):
        device.allocate(8, stop)
    device.close()
    assert not +cuda.live


@pytest.mark.parametrize("call", ["cuStreamCreateWithPriority", "cuEventCreate", "cuMemHostAlloc"])
def test_a_gpu_that_cannot_be_taken_into_use_is_given_back(cuda: FakeCuda, call: str) -> None:
    cuda.fails[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CudaError, match=call):
        CudaWorkerDevice(0, False, cuda.driver())
    assert not +cuda.live


@pytest.mark.parametrize("count", [0, 1, WORDS - 1, WORDS, WORDS + 1, 3 * WORDS])
def test_words_are_written_and_read_by_any_thread(cuda: FakeCuda, count: int) -> None:
    """More than are read at a time too; the words around them stay. Meanwhile no capture is in the way."""
    device = CudaWorkerDevice(0, False, cuda.driver())
    memory = device.allocate(4 * (count + 2))
    read: list[int] = []

    def use() -> None:
        device.write_words(memory.address + 4, 0xFFFFFFFE, count)
        read.extend(device.read_words(memory.address, count + 2))
        assert cuda.thread.mode == 0  # as it was

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert read == [0, *[0xFFFFFFFE] * count, 0]
    memory.close()
    device.close()


def test_words_that_do_not_come_are_an_error(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("copyengine.device.cuda_worker.WORDS_S", 0.05)
    device = CudaWorkerDevice(0, False, cuda.driver())
    memory = device.allocate(4)
    cuda.hold()
    with pytest.raises(CudaError, match=r"cuEventQuery: CUDA_ERROR_NOT_READY after 0\.05 s"):
        device.read_words(memory.address, 1)
    cuda.go_on()
    assert device.read_words(memory.address, 1) == [0]
    memory.close()
    device.close()


def test_a_flag_is_waited_for_on_the_stream_that_is_named(cuda: FakeCuda) -> None:
    device = CudaWorkerDevice(0, False, cuda.driver())
    assert device.has_stream_waits
    device.wait_flag(0xABC, 0x1234)
    assert cuda.calls[-1] == f"{0xABC} waits for {0x1234} >= 1"
    device.close()


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 70_000])
def test_a_ring_is_mapped_in_whole_pages(cuda: FakeCuda, nbytes: int) -> None:
    """The fake driver refuses any other; it finds the ring 0x1000 further on."""
    device = CudaWorkerDevice(0, False, cuda.driver())
    ring = create_segment("test", "ring", nbytes)
    mapped = device.map_ring(ring)
    assert mapped.address == ring.array.ctypes.data + 0x1000
    mapped.close()
    mapped.close()
    cuda.fails["cuMemHostGetDevicePointer"] = CUresult.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(CudaError, match="cuMemHostGetDevicePointer"):
        device.map_ring(ring)
    ring.close()
    device.close()
    assert not +cuda.live


@pytest.mark.parametrize("nbytes", [1, 4096, 70_000])
def test_host_memory_is_pinned_for_the_device_zeroed_and_let_go(cuda: FakeCuda, nbytes: int) -> None:
    """The fake driver finds host memory 0x1000 further on than the processor, as MAPPED memory alone."""
    device = CudaWorkerDevice(1, False, cuda.driver())
    before = +cuda.live
    memory = device.allocate_host(nbytes)
    assert memory.address == memory.array.ctypes.data + 0x1000
    assert memory.array.shape == (nbytes,) and not memory.array.any()
    memory.array[:] = 7
    memory.close()
    memory.close()
    assert +cuda.live == before
    for call in ("cuMemHostRegister", "cuMemHostGetDevicePointer"):
        cuda.fails[call] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(ConfigError, match=f"{nbytes} bytes .*{call}.*--kv-placement device"):
            device.allocate_host(nbytes)
        assert +cuda.live == before
    device.close()
    assert not +cuda.live
