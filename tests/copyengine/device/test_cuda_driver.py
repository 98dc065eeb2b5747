"""The typed layer over the driver against a driver in Python: errors are named, and what is missing is said."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from copyengine.device.cuda_driver import CudaError, Driver, load_driver
from copyengine.device.probe import GpuFacts, cuda_devices, find_gpus
from copyengine.wire.errors import ConfigError
from tests.copyengine.device.fake_cuda import CUresult, FakeCuda, FakeMachine


def test_a_failing_call_is_named_with_its_error() -> None:
    """One that goes through the common way, and each of those that take a shorter one."""
    cuda = FakeCuda(FakeMachine())
    driver = cuda.driver()
    driver.enter(driver.retain_context(driver.device(0)))
    stream, event = driver.stream(), driver.event()
    calls: dict[str, Callable[[], object]] = {
        "cuMemAlloc": lambda: driver.allocate(1),
        "cuMemGetInfo": driver.memory,
        "cuMemGetAddressRange": lambda: driver.allocation(1),
        "cuCtxGetStreamPriorityRange": driver.stream,
        "cuMemcpyHtoDAsync": lambda: driver.copy_to_device(1, 1, 1, stream),
        "cuMemcpyBatchAsync": lambda: driver.copy_batch_to_device([1], [1], [1], stream),
        "cuStreamWriteValue32": lambda: driver.write_word(1, 1, stream),
        "cuEventRecord": lambda: driver.record(event, stream),
        "cuEventQuery": lambda: driver.has_happened(event),
    }
    for name, call in calls.items():
        cuda.fails[name] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        with pytest.raises(CudaError, match=f"^{name}: CUDA_ERROR_ILLEGAL_ADDRESS$") as caught:
            call()
        assert not caught.value.refused
    cuda.fails["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CudaError) as caught:
        driver.allocate(1)
    assert caught.value.refused


def test_what_a_broken_gpu_does_not_take_back_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """An error of an earlier operation ends no clean-up; that something is freed twice is a bug, and raises."""
    cuda = FakeCuda(FakeMachine())
    driver = cuda.driver()
    calls: dict[str, Callable[[], object]] = {
        "cuMemFree": lambda: driver.free(1),
        "cuMemFreeHost": lambda: driver.free_host(1),
        "cuMemHostUnregister": lambda: driver.unregister_host(1),
        "cuIpcCloseMemHandle": lambda: driver.close_export(1),
        "cuStreamDestroy": lambda: driver.destroy_stream(None),
        "cuEventDestroy": lambda: driver.destroy_event(None),
        "cuDevicePrimaryCtxRelease": lambda: driver.release_context(0),
    }
    for name, call in calls.items():
        cuda.fails[name] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        call()
        assert f"{name}: CUDA_ERROR_ILLEGAL_ADDRESS" in caplog.text
        cuda.fails[name] = CUresult.CUDA_ERROR_INVALID_VALUE
        with pytest.raises(CudaError, match=name):
            call()


@pytest.mark.parametrize(
    ("version", "bindings", "has"),
    [(12070, 12, False), (12080, 12, True), (12090, 13, False), (13000, 13, True), (13000, 12, True)],
)
def test_batches_need_a_driver_of_the_bindings_form(version: int, bindings: int, has: bool) -> None:
    """The table is that of the release notes: new in 12.8, another signature in 13.0."""
    assert Driver(FakeCuda(FakeMachine(), version), bindings).has_batches == has


def bindings(monkeypatch: pytest.MonkeyPatch, cuda: object) -> None:
    """`cuda.bindings.driver` is `cuda`."""
    package = ModuleType("cuda.bindings")
    package.__dict__["__version__"] = "13.3.1"
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": package, "cuda.bindings.driver": cuda}.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_what_is_missing_is_said_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package; a package that finds no library, as it tells it; a driver that finds no GPU. None of them breaks the
    probe."""
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    refused("cuda-bindings")

    class NoLibrary(FakeCuda):
        def cuInit(self, flags: int) -> None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    bindings(monkeypatch, NoLibrary(FakeMachine()))
    refused("dlopen libcuda.so.1; install the NVIDIA driver")
    bindings(monkeypatch, FakeCuda(FakeMachine(gpus=0)))
    refused("cuInit: CUDA_ERROR_NO_DEVICE")
    bindings(monkeypatch, FakeCuda(FakeMachine()))
    assert load_driver().device_count() == 2


def refused(why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_driver()
    assert cuda_devices() == []


def test_the_probe_tells_what_there_is_and_leaves_nothing() -> None:
    machine = FakeMachine(gpu_nbytes=8 << 20)
    other, cuda = FakeCuda(machine), FakeCuda(machine)
    driver = other.driver()
    driver.enter(driver.retain_context(driver.device(1)))
    driver.allocate(3 << 20)
    facts = cuda_devices(cuda.driver())
    assert facts == [
        GpuFacts(0, "Fake", "0000:01:00.0", 8 << 20, 8 << 20, True, (9, 0)),
        GpuFacts(1, "Fake", "0000:02:00.0", 8 << 20, 5 << 20, True, (9, 0)),
    ]
    cuda.no_ipc = True
    assert [fact.ipc for fact in cuda_devices(cuda.driver())] == [False, False]
    cuda.fails["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert not cuda_devices(cuda.driver())[0].ipc
    assert not +cuda.live


def test_a_gpu_that_gives_no_context_is_named_beside_the_others() -> None:
    cuda = FakeCuda(FakeMachine())
    cuda.machine.gpus[0].context_error = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    found = find_gpus(cuda.driver())
    assert [gpu.ordinal for gpu in found.gpus] == [1] and not +cuda.live
    (why,) = found.refused
    assert why.startswith("GPU 0000:01:00.0 cannot be used: cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY; ")
