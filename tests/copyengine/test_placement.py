"""Where processes go, on machines made up for it: against the rules as README and ARCHITECTURE state them; what each
worker allocates there: against sums of what is free."""

import importlib.machinery
import importlib.util
from pathlib import Path

import msgspec
import psutil
import pytest

from copyengine import placement
from copyengine.budget import GPU_RESERVE_NBYTES, Budget, Wanted
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.device import probe
from copyengine.device.cuda_driver import CudaError
from copyengine.device.probe import GpuFacts
from copyengine.families import parse_spec
from copyengine.placement import CopyEngineChoice, DeviceChoice, Placement, memory_plan, place
from copyengine.wire.errors import ConfigError
from tests.copyengine.device.fake_cuda import CUresult, FakeCuda, FakeMachine
from tests.copyengine.made_up_gpus import GB, H200, gpus, pretend

NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
SPEC = parse_spec(
    model_config(Sizes(layers=2, hidden=2560, intermediate=640, experts=512, experts_per_token=10, vocab_size=1000))
    | NVFP4
)
"""Flash-Next's experts in two layers of a small model."""


@pytest.mark.parametrize(
    ("count", "asked", "copy_engine", "workers", "device", "form"),
    [
        (0, "auto", "auto", 1, "cpu", "process"),
        (0, "cpu", "thread", 1, "cpu", "thread"),
        (0, "auto", "auto", 3, "cpu", "process"),
        (1, "auto", "auto", 1, "cuda", "process"),
        (1, "cpu", "auto", 9, "cpu", "process"),
        (1, "cuda", "thread", 1, "cuda", "thread"),
        (8, "auto", "auto", 3, "cuda", "process"),
        (2, "cuda", "process", 2, "cuda", "process"),
    ],
)
def test_where_the_processes_go(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    asked: DeviceChoice,
    copy_engine: CopyEngineChoice,
    workers: int,
    device: str,
    form: str,
) -> None:
    """Worker i on the i-th GPU, the copy engine a process unless it is asked to be a thread."""
    pretend(monkeypatch, gpus(count))
    placed = place(asked, copy_engine, workers)
    assert (placed.device, placed.copy_engine, placed.copy_engine_reason) == (device, form, "")
    assert [gpu.ordinal for gpu in placed.gpus] == (list(range(workers)) if device == "cuda" else [])


def test_nobody_looks_for_gpus_that_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AssertionError("the driver was asked"))
    assert place("cpu", "auto", 1) == Placement((), "process", "as --device says")


def test_memory_that_cannot_be_shared_makes_the_copy_engine_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus(1, ipc=False))
    placed = place("auto", "auto", 1)
    assert placed.copy_engine == "thread" and "GPU 0 (NVIDIA H200) cannot share" in placed.copy_engine_reason
    pretend(monkeypatch, [*gpus(1), msgspec.structs.replace(H200, ordinal=1, ipc=False)])
    assert place("auto", "auto", 1).copy_engine == "process"  # the second one is not used


@pytest.mark.parametrize(
    ("found", "device", "copy_engine", "workers", "names"),
    [
        ([], "cuda", "auto", 1, ["--device cuda", "no GPU was found", "--device cpu"]),
        (gpus(1, capability=(7, 5)), "cuda", "auto", 1, ["--device cuda", "8.0"]),
        (gpus(2), "auto", "auto", 3, ["--workers 3", "has 2", "--workers 2"]),
        (gpus(1), "cuda", "auto", 64, ["--workers 64", "has 1"]),
        (gpus(1, ipc=False), "auto", "process", 1, ["--copy-engine process", "GPU 0", "thread"]),
        (gpus(2, ipc=False), "auto", "auto", 2, ["GPU 0", "cannot share", "--workers 2", "--workers 1"]),
        (gpus(2), "auto", "thread", 2, ["--copy-engine thread", "--workers 2"]),
    ],
)
def test_what_the_machine_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    found: list[GpuFacts],
    device: DeviceChoice,
    copy_engine: CopyEngineChoice,
    workers: int,
    names: list[str],
) -> None:
    pretend(monkeypatch, found)
    with pytest.raises(ConfigError) as refused:
        place(device, copy_engine, workers)
    message = str(refused.value)
    assert "\n" not in message and all(name in message for name in names), message


@pytest.mark.parametrize(
    ("lacking", "found", "why"),
    [
        ("triton is not installed", gpus(1), "triton is not installed"),
        ("", [], "no GPU was found"),
        ("", gpus(1, capability=(7, 5)), "8.0"),
        ("", CudaError("cuDeviceGetCount", "CUDA_ERROR_SYSTEM_NOT_READY"), "cuDeviceGetCount"),
    ],
)
def test_auto_takes_the_cpu_and_says_why(
    monkeypatch: pytest.MonkeyPatch, lacking: str, found: list[GpuFacts] | Exception, why: str
) -> None:
    pretend(monkeypatch, found, lacking)
    placed = place("auto", "auto", 1)
    assert placed.gpus == () and placed.reason.startswith("--device auto: ") and why in placed.reason
    with pytest.raises(ConfigError, match="--device cuda: "):
        place("cuda", "auto", 1)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_gives_no_context_is_left_out(monkeypatch: pytest.MonkeyPatch, device: DeviceChoice) -> None:
    """The second of three, as one that is full or another process's alone: the workers go to the others, and the reason
    says why. If none is left, that is why there are none."""
    machine = FakeMachine(gpus=3)
    cuda = FakeCuda(machine)
    monkeypatch.setattr(placement, "lacking_for_gpus", lambda: "")
    monkeypatch.setattr(probe, "load_driver", cuda.driver)
    machine.gpus[1].context_error = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    placed = place(device, "auto", 2)
    assert [gpu.ordinal for gpu in placed.gpus] == [0, 2] and not +cuda.live
    why = "left out: GPU 0000:02:00.0 cannot be used: cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"
    assert why in placed.reason and ("2 GPUs were found" in placed.reason) == (device == "auto")
    with pytest.raises(ConfigError, match=f"--workers 3: .* has 2 that can be used.*{why}"):
        place(device, "auto", 3)
    cuda.fails["cuMemGetInfo"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS  # once, so on the first
    placed = place(device, "auto", 1)
    assert [gpu.ordinal for gpu in placed.gpus] == [2] and "GPU 0 cannot be used: cuMemGetInfo" in placed.reason
    for gpu in machine.gpus:
        gpu.context_error = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    if device == "auto":
        assert place(device, "auto", 1).gpus == () and "0000:03:00.0" in place(device, "auto", 1).reason
    else:
        with pytest.raises(ConfigError, match=r"0000:01:00\.0.*0000:03:00\.0"):
            place(device, "auto", 1)


def test_an_old_gpu_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [*gpus(1, capability=(7, 5)), msgspec.structs.replace(H200, ordinal=1)])
    placed = place("auto", "auto", 1)
    assert [gpu.ordinal for gpu in placed.gpus] == [1]
    assert "a GPU was found; left out: GPU 0 (NVIDIA H200) has compute capability 7.5, less than 8.0" in placed.reason


@pytest.mark.parametrize(
    ("text", "absent", "lacking"),
    [
        ("cuda: Optional[str] = '13.0'\n", "", ""),
        ("cuda = '12.8'\n", "", ""),
        (
            "cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n",
            "",
            "torch is installed without CUDA (install a CUDA build of it to use a GPU)",
        ),
        ("cuda: Optional[str] = '13.0'\n", "triton", "triton is not installed"),
        ("cuda: Optional[str] = '13.0'\n", "cuda", "cuda-bindings is not installed"),
        ("cuda: Optional[str] = '13.0'\n", "cuda.bindings", "cuda-bindings is not installed"),
    ],
)
def test_packages_that_a_gpu_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, absent: str, lacking: str
) -> None:
    """Against torch's version.py as its builds have it."""
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{text}")
    spec = importlib.machinery.ModuleSpec("any", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else spec)
    assert placement.lacking_for_gpus() == lacking


def planned(on: tuple[GpuFacts, ...], workers: int, available_nbytes: int, slots: int = 0) -> Budget:
    plan = memory_plan(SPEC, "bfloat16", Placement(on, "process", ""), available_nbytes)
    return plan.settled(Wanted(slots=slots, max_running=16, workers=workers))


def test_memory_is_planned_for_the_fullest_gpu() -> None:
    """Against the sums: what is free on GPU 1, and what the banks and two workers take on the host."""
    two = (H200, msgspec.structs.replace(H200, ordinal=1, free_nbytes=5 * GB))
    budget = planned(two, 2, 20 * GB)
    assert budget.reserve_nbytes == GPU_RESERVE_NBYTES and 5 * GB - 3_000_000 < budget.total_nbytes <= 5 * GB
    assert budget.slots < 1024 == planned((H200,), 1, 20 * GB).slots
    with pytest.raises(ConfigError, match=r"memory of cuda:1 NVIDIA H200: .*5,000 MB available; use --slots"):
        planned(two, 2, 20 * GB, slots=1000)
    assert planned((H200,), 1, 9 * GB).slots == 1024
    with pytest.raises(ConfigError, match=r"host memory: 9,274 MB needed .*9,000 MB available"):
        planned(two, 2, 9 * GB)


def test_no_gpu_memory_is_asked_for_on_the_host() -> None:
    budget = planned((), 1, 20 * GB)
    assert budget.reserve_nbytes == 0 and budget.slots == 256


@pytest.mark.gpu
def test_auto_finds_the_gpus_of_this_machine() -> None:
    """Against what torch finds."""
    import torch

    count = torch.cuda.device_count()
    placed = place("auto", "auto", count)
    assert [gpu.name for gpu in placed.gpus] == [torch.cuda.get_device_name(i) for i in range(count)]
    for gpu in placed.gpus:
        free, total = torch.cuda.mem_get_info(gpu.ordinal)
        assert gpu.total_nbytes == total and abs(gpu.free_nbytes - free) < 2 * GB
    assert planned(placed.gpus, 1, psutil.virtual_memory().available).slots >= 128
