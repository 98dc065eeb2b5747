"""The command line: frozen here, so that a flag is changed on purpose. Checked against README's promises."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import launch
from copyengine.budget import Wanted
from copyengine.checkpoint.model import Model, open_model
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.placement import Placement
from copyengine.wire import cli
from copyengine.wire.errors import ConfigError
from copyengine.wire.lifecycle import Ready
from tests.copyengine.made_up_gpus import GB, H200, gpus, pretend
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
    "--disable-prefix-cache": False,
    "--dtype": "auto",
    "--load-format": "auto",
    "--device": "auto",
    "--host": "127.0.0.1",
    "--port": 5757,
    "--collect-stats": "",
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


def settings(*argv: str) -> launch.LaunchConfig:
    return cli.parse(launch.LaunchConfig, argv, "launch.py")


@pytest.fixture
def made_up(tmp_path: Path) -> Model:
    """Flash-Next's experts in two layers of a small model, with no weights."""
    sizes = Sizes(layers=2, hidden=2560, intermediate=640, experts=512, experts_per_token=10, vocab_size=1000)
    quantisation = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(model_config(sizes) | quantisation))
    return open_model(tmp_path, load_format="dummy")


def free_host_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=nbytes))


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ([], Wanted(max_running=16)),
        (["--slots", "7", "--kv-tokens", "99", "--demand-tokens", "0"], Wanted(7, 99, False, max_running=16)),
        (["--chunked-prefill-size", "5", "--max-running-requests", "3"], Wanted(max_step_tokens=5, max_running=3)),
    ],
)
def test_the_flags_say_which_sizes_are_wanted(argv: list[str], wanted: Wanted) -> None:
    """Against Wanted's own words."""
    assert launch.wanted(settings(*argv)) == wanted


def test_what_does_not_fit_is_refused_before_anything_starts(
    made_up: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers' worth of host memory beside the banks, on a machine that has one's."""
    free_host_memory(monkeypatch, 9 * GB)
    pretend(monkeypatch, gpus(2))
    assert launch.main(["--workers", "2", "--load-format", "dummy", "--model", str(made_up.directory)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: host memory: 9,274 MB needed ") and err.count("\n") == 1


FACTS: dict[str, Any] = {
    "model": "m", "workers": 2, "device": "cuda:0 NVIDIA H200, cuda:1 NVIDIA H200", "dtype": "bfloat16",
    "moe_layers": 2, "experts": 512, "experts_per_token": 10, "slots": 1000, "stream_slots": 512, "bank_nbytes": 1,
    "pool_nbytes": 1, "kv_tokens": 16, "kv_nbytes": 1, "max_model_len": 16, "demand_tokens": 512,
    "copy_engine": "thread", "event_loop": "uvloop",
}  # fmt: skip


def test_the_ready_block_says_which_device_and_why(made_up: Model) -> None:
    placement = Placement((H200,), "thread", "--device auto: a GPU was found", "GPU 0 cannot share its memory")
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


def test_each_worker_is_told_its_gpu(made_up: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the command lines that the processes would be started with, where the second GPU cannot be used."""
    free_host_memory(monkeypatch, 20 * GB)
    pretend(monkeypatch, gpus(3)[::2])
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
        assert (worker.device, worker.ordinal, worker.copy_engine) == ("cuda", 2 * i, "tcp://copyengine")
    scheduler = children.argv["scheduler"]
    assert {"--load-format=dummy", f"--slots={budget.slots}", "--workers=tcp://worker0,tcp://worker1"} <= {*scheduler}
