"""The command line: frozen here, so that a flag is changed on purpose. Checked against README's promises."""

import importlib.machinery
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import launch
from copyengine.budget import GPU_RESERVE_NBYTES
from copyengine.checkpoint.model import Model, open_model
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.device.probe import GpuFacts
from copyengine.wire import cli
from copyengine.wire.errors import ConfigError
from copyengine.wire.lifecycle import Ready
from worker.config import WorkerConfig

FLAGS = {
    "--model": "",
    "--workers": 1,
    "--demand-tokens": 512,
    "--slots": "auto",
    "--max-running-requests": 16,
    "--max-queued-requests": 256,
    "--chunked-prefill-size": 4096,
    "--max-model-len": 0,
    "--kv-tokens": "auto",
    "--dtype": "auto",
    "--load-format": "auto",
    "--device": "auto",
    "--host": "127.0.0.1",
    "--port": 5757,
    "--event-loop": "auto",
    "--copy-engine": "auto",
    "--served-model-name": "",
    "--hf-overrides": "{}",
    "--prompt": None,
    "--log-level": "info",
    "--ready-timeout-s": 120.0,
}
"""Every flag of launch.py and its default."""


def test_the_flags_are_the_documented_ones() -> None:
    config = cli.parse(launch.LaunchConfig, [], "launch.py")
    stated = {f"--{name.replace('_', '-')}": getattr(config, name) for name in config.__struct_fields__}
    assert stated == FLAGS


def test_demand_tokens_has_its_long_name() -> None:
    config = cli.parse(launch.LaunchConfig, ["--moe-prefill-demand-tokens", "7"], "launch.py")
    assert config.demand_tokens == 7


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--slots", "none"], ["--slots", "none"]),
        (["--workers", "0"], ["--workers", "0"]),
        (["--bogus"], ["--bogus"]),
        (["--slots", "100000000000000000000"], ["--slots"]),
        (["--max-running-requests", "100000000000000000000"], ["--max-running-requests"]),
        (["--ready-timeout-s", "inf"], ["--ready-timeout-s", "inf"]),
        (["--ready-timeout-s", "nan"], ["--ready-timeout-s", "nan"]),
        (["--workers", "1000000000"], ["--workers"]),
        (["--model", "a" * 300], ["a" * 300]),
        (["--event-loop", "proactor"], ["--event-loop", "proactor"]),
        (["--device", "cuda"], ["--device", "cuda"]),
        (["--device", "cpu", "--copy-engine", "thread", "--workers", "2"], ["--copy-engine", "--workers"]),
        (["--model", "no/such/directory"], ["no/such/directory"]),
    ],
)
def test_a_refused_start_is_one_line_and_exit_code_2(
    argv: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert all(name in err for name in names)


def test_a_config_survives_its_command_line() -> None:
    config = cli.parse(launch.LaunchConfig, ["--slots", "128", "--prompt", "a b", "--port", "0"], "launch.py")
    assert cli.parse(launch.LaunchConfig, cli.to_argv(config), "launch.py") == config


def test_a_config_error_is_raised_not_printed_by_the_parser() -> None:
    with pytest.raises(ConfigError, match="--port"):
        cli.parse(launch.LaunchConfig, ["--port", "70000"], "launch.py")


GB = 10**9
H200 = GpuFacts(0, "NVIDIA H200", "0000:1b:00.0", 150 * GB, 140 * GB, True, (9, 0))
Find = Callable[[list[GpuFacts]], None]


def gpus(count: int, **changes: Any) -> list[GpuFacts]:
    return [msgspec.structs.replace(H200, ordinal=i, **changes) for i in range(count)]


def settings(*argv: str) -> launch.LaunchConfig:
    return cli.parse(launch.LaunchConfig, argv, "launch.py")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Find:
    """Makes up a machine with these GPUs, and all packages that they need."""
    monkeypatch.setattr(launch, "lacking_for_gpus", lambda: "")

    def found(made_up: list[GpuFacts]) -> None:
        monkeypatch.setattr(launch, "cuda_devices", lambda: made_up)

    found([])
    return found


@pytest.mark.parametrize(
    ("count", "argv", "device", "copy_engine"),
    [
        (0, [], "cpu", "process"),
        (0, ["--device", "cpu", "--copy-engine", "thread"], "cpu", "thread"),
        (0, ["--workers", "3"], "cpu", "process"),
        (1, [], "cuda", "process"),
        (1, ["--device", "cpu", "--workers", "9"], "cpu", "process"),
        (1, ["--device", "cuda", "--copy-engine", "thread"], "cuda", "thread"),
        (8, ["--workers", "3"], "cuda", "process"),
        (2, ["--device", "cuda", "--workers", "2", "--copy-engine", "process"], "cuda", "process"),
    ],
)
def test_where_the_processes_go(machine: Find, count: int, argv: list[str], device: str, copy_engine: str) -> None:
    """Worker i on GPU i, the copy engine a process unless it is asked to be a thread."""
    machine(gpus(count))
    config = settings(*argv)
    placement = launch.place(config)
    assert (placement.device, placement.copy_engine, placement.copy_engine_reason) == (device, copy_engine, "")
    assert [gpu.ordinal for gpu in placement.gpus] == (list(range(config.workers)) if device == "cuda" else [])


def test_memory_that_cannot_be_shared_makes_the_copy_engine_a_thread(machine: Find) -> None:
    machine(gpus(1, ipc=False))
    placement = launch.place(settings())
    assert placement.copy_engine == "thread" and "GPU 0 (NVIDIA H200) cannot share" in placement.copy_engine_reason
    machine([*gpus(1), msgspec.structs.replace(H200, ordinal=1, ipc=False)])
    assert launch.place(settings()).copy_engine == "process"  # the second one is not used


@pytest.mark.parametrize(
    ("found", "argv", "names"),
    [
        ([], ["--device", "cuda"], ["--device cuda", "no GPU was found", "--device cpu"]),
        (gpus(1, capability=(7, 5)), ["--device", "cuda"], ["--device cuda", "8.0"]),
        (gpus(2), ["--workers", "3"], ["--workers 3", "has 2", "--workers 2"]),
        (gpus(1), ["--device", "cuda", "--workers", "64"], ["--workers 64", "has 1"]),
        (gpus(1, ipc=False), ["--copy-engine", "process"], ["--copy-engine process", "GPU 0", "thread"]),
        (gpus(2, ipc=False), ["--workers", "2"], ["GPU 0", "cannot share", "--workers 2", "--workers 1"]),
        (gpus(2), ["--workers", "2", "--copy-engine", "thread"], ["--copy-engine thread", "--workers 2"]),
    ],
)
def test_what_the_machine_does_not_have_is_refused(
    machine: Find, found: list[GpuFacts], argv: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    machine(found)
    assert launch.main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(name in err for name in names), err


@pytest.mark.parametrize(
    ("lacking", "found", "why"),
    [
        ("triton is not installed", gpus(1), "triton is not installed"),
        ("", [], "no GPU was found"),
        ("", gpus(1, capability=(7, 5)), "8.0"),
        ("", ConfigError("GPU 0: cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"), "OUT_OF_MEMORY"),
    ],
)
def test_auto_takes_the_cpu_and_says_why(
    monkeypatch: pytest.MonkeyPatch, lacking: str, found: list[GpuFacts] | Exception, why: str
) -> None:
    def find() -> list[GpuFacts]:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(launch, "lacking_for_gpus", lambda: lacking)
    monkeypatch.setattr(launch, "cuda_devices", find)
    placement = launch.place(settings())
    assert placement.gpus == () and placement.reason.startswith("--device auto: ") and why in placement.reason
    with pytest.raises(ConfigError, match="--device cuda: "):
        launch.place(settings("--device", "cuda"))


@pytest.mark.parametrize(
    ("text", "absent", "lacking"),
    [
        ("cuda: Optional[str] = '13.0'\n", "", ""),
        ("cuda = '12.8'\n", "", ""),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n", "", "torch is installed without CUDA"),
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
    assert launch.lacking_for_gpus() == lacking


@pytest.fixture
def made_up(tmp_path: Path) -> Model:
    """Flash-Next's experts in two layers of a small model, with no weights."""
    sizes = Sizes(layers=2, hidden=2560, intermediate=640, experts=512, experts_per_token=10, vocab_size=1000)
    quantisation = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(model_config(sizes) | quantisation))
    return open_model(tmp_path, load_format="dummy")


def free_host_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=nbytes))


def test_memory_is_planned_for_the_fullest_gpu(machine: Find, made_up: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the sums: what is free on GPU 1, and what the banks and two workers take on the host."""
    free_host_memory(monkeypatch, 20 * GB)
    machine([H200, msgspec.structs.replace(H200, ordinal=1, free_nbytes=5 * GB)])
    config = settings("--workers", "2")
    budget = launch.plan_memory(config, made_up, launch.place(config))
    assert budget.reserve_nbytes == GPU_RESERVE_NBYTES and 5 * GB - 2_765_056 < budget.total_nbytes <= 5 * GB
    assert budget.slots < 1024 == launch.plan_memory(settings(), made_up, launch.place(settings())).slots
    with pytest.raises(ConfigError, match=r"memory of cuda:1 NVIDIA H200: .*5,000 MB available; lower --slots"):
        settled = settings("--workers", "2", "--slots", "1000")
        launch.plan_memory(settled, made_up, launch.place(settled))
    free_host_memory(monkeypatch, 9 * GB)
    assert launch.plan_memory(settings(), made_up, launch.place(settings())).slots == 1024
    with pytest.raises(ConfigError, match=r"host memory: 9,274 MB needed .*9,000 MB available"):
        launch.plan_memory(config, made_up, launch.place(config))


def test_no_gpu_memory_is_asked_for_on_the_host(made_up: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    free_host_memory(monkeypatch, 20 * GB)
    config = settings("--device", "cpu")
    budget = launch.plan_memory(config, made_up, launch.place(config))
    assert budget.reserve_nbytes == 0 and budget.slots == 256


FACTS: dict[str, Any] = {
    "model": "m", "workers": 2, "device": "cuda:0 NVIDIA H200, cuda:1 NVIDIA H200", "dtype": "bfloat16",
    "moe_layers": 2, "experts": 512, "experts_per_token": 10, "slots": 1000, "stream_slots": 512, "bank_nbytes": 1,
    "pool_nbytes": 1, "kv_tokens": 16, "kv_nbytes": 1, "max_model_len": 16, "demand_tokens": 512,
    "copy_engine": "thread", "event_loop": "uvloop",
}  # fmt: skip


def test_the_ready_block_says_which_device_and_why(made_up: Model) -> None:
    placement = launch.Placement((H200,), "thread", "--device auto: a GPU was found", "GPU 0 cannot share its memory")
    block = launch.ready_block(made_up, placement, Ready(FACTS), "tcp://127.0.0.1:1")
    for words in (
        "2 on cuda:0 NVIDIA H200, cuda:1 NVIDIA H200",
        "cuda, --device auto: a GPU was found",
        "pinned memory, copied by a thread: GPU 0 cannot share its memory",
        "random weights",
    ):
        assert words in block, block


class Children:
    """Stands in for the processes: keeps their command lines, and answers as they would."""

    def __init__(self) -> None:
        self.argv: dict[str, list[str]] = {}

    def spawn(self, name: str, module: str, config: msgspec.Struct) -> str:
        self.argv[name] = cli.to_argv(config)
        return f"tcp://{name}"


def test_each_worker_is_told_its_gpu(made_up: Model, machine: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the command lines that the processes would be started with."""
    free_host_memory(monkeypatch, 20 * GB)
    machine(gpus(3))
    children = Children()
    monkeypatch.setattr(launch.Engine, "_spawn", lambda _, *arguments: children.spawn(*arguments))
    monkeypatch.setattr(launch.Engine, "_wait_for", lambda *_: Ready(FACTS))
    config = settings("--workers", "2", "--load-format", "dummy", "--model", str(made_up.directory))
    model, placement, budget = launch.preflight(config)
    launch.Engine(config, placement, launch.ProgressLine()).start(model.directory, budget)
    assert list(children.argv) == ["copyengine", "worker0", "worker1", "scheduler"]
    assert "--device=cuda" in children.argv["copyengine"]
    for i in range(2):
        worker = cli.parse(WorkerConfig, children.argv[f"worker{i}"], "worker")
        assert (worker.device, worker.ordinal, worker.copy_engine) == ("cuda", i, "tcp://copyengine")
    scheduler = children.argv["scheduler"]
    assert {"--load-format=dummy", f"--slots={budget.slots}", "--workers=tcp://worker0,tcp://worker1"} <= {*scheduler}


@pytest.mark.gpu
def test_auto_finds_the_gpus_of_this_machine(made_up: Model) -> None:
    """Against what torch finds."""
    import torch

    placement = launch.place(settings("--workers", str(torch.cuda.device_count())))
    assert [gpu.name for gpu in placement.gpus] == [
        torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
    ]
    for gpu in placement.gpus:
        free, total = torch.cuda.mem_get_info(gpu.ordinal)
        assert gpu.total_nbytes == total and abs(gpu.free_nbytes - free) < 2 * GB
    assert launch.plan_memory(settings(), made_up, placement).slots >= 128
