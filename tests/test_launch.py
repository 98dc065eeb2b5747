"""The command line: frozen here, so that a flag is changed on purpose. Checked against README's promises."""

import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import launch
from copyengine.budget import Wanted
from copyengine.checkpoint.model import Model, open_model
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.link_rate import LinkRate
from copyengine.placement import Placement
from copyengine.wire import cli
from copyengine.wire.errors import ConfigError, PeerDied
from copyengine.wire.lifecycle import Ready
from copyengine.wire.restarts import Role
from scheduler.config import LaunchConfig, SchedulerConfig
from scheduler.http.config import HttpConfig
from scheduler.preflight import preflight, wanted
from scheduler.progress_line import ProgressLine
from scheduler.ready_block import ready_block
from tests.copyengine.made_up_gpus import GB, H200, gpus, pretend
from worker.config import WorkerConfig

FLAGS = {
    "--model": "",
    "--workers": 1,
    "--demand-tokens": 512,
    "--slots": "auto",
    "--cache-policy": "lru",
    "--max-running-requests": 16,
    "--max-queued-requests": 256,
    "--chunked-prefill-size": 4096,
    "--max-model-len": 0,
    "--kv-tokens": "auto",
    "--vram-reserve-bytes": "auto",
    "--token-embedding-placement": "device",
    "--kv-placement": "device",
    "--state-slots": "auto",
    "--disable-prefix-cache": False,
    "--deterministic": False,
    "--verify-copies": False,
    "--dtype": "auto",
    "--load-format": "auto",
    "--expert-activations": "plain",
    "--device": "auto",
    "--host": "127.0.0.1",
    "--port": 5757,
    "--collect-stats": "",
    "--event-loop": "auto",
    "--copy-engine": "auto",
    "--served-model-name": "",
    "--hf-overrides": "{}",
    "--http-port": None,
    "--http-host": "127.0.0.1",
    "--api-key": "",
    "--http-max-body-bytes": 8 * 2**20,
    "--prompt": None,
    "--check": False,
    "--log-level": "info",
    "--ready-timeout-s": 120.0,
    "--watchdog-s": 20.0,
    "--drain-timeout-s": 60.0,
}
"""Every flag of launch.py and its default."""


def test_the_flags_are_the_documented_ones() -> None:
    config = cli.parse(LaunchConfig, [], "launch.py")
    stated = {f"--{name.replace('_', '-')}": getattr(config, name) for name in config.__struct_fields__}
    assert stated == FLAGS


def test_demand_tokens_has_its_long_name() -> None:
    config = cli.parse(LaunchConfig, ["--moe-prefill-demand-tokens", "7"], "launch.py")
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
    config = cli.parse(LaunchConfig, ["--slots", "128", "--prompt", "a b", "--port", "0"], "launch.py")
    assert cli.parse(LaunchConfig, cli.to_argv(config), "launch.py") == config


def test_a_config_error_is_raised_not_printed_by_the_parser() -> None:
    with pytest.raises(ConfigError, match="--port"):
        cli.parse(LaunchConfig, ["--port", "70000"], "launch.py")


def test_a_check_refuses_the_cache_policy_that_a_start_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dense model has nothing that it could be of; with the policy that it has anyway the check goes through."""
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(model_config(Sizes(layers=1, experts=0))))
    argv = ["--check", "--device", "cpu", "--port", "0", "--model", str(tmp_path), "--load-format", "dummy"]
    assert launch.main([*argv, "--cache-policy", "lrfu"]) == 2
    assert "--cache-policy lrfu: a dense model has no experts" in capsys.readouterr().err
    assert launch.main([*argv, "--cache-policy", "lru"]) == 0


def settings(*argv: str) -> LaunchConfig:
    return cli.parse(LaunchConfig, argv, "launch.py")


@pytest.fixture
def made_up(tmp_path: Path) -> Model:
    """Flash-Next's experts in two layers of a small model, with no weights."""
    sizes = Sizes(layers=2, hidden=2560, intermediate=640, experts=512, experts_per_token=10, vocab_size=1000)
    quantisation = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(model_config(sizes) | quantisation))
    return open_model(tmp_path, load_format="dummy")


def free_host_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr("copyengine.available.host_nbytes", lambda: nbytes)


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [
        ([], Wanted(max_running=16)),
        (["--slots", "7", "--kv-tokens", "99", "--demand-tokens", "0"], Wanted(7, 99, False, max_running=16)),
        (["--state-slots", "40"], Wanted(max_running=16, state_slots=40)),
        (["--disable-prefix-cache"], Wanted(max_running=16, prefix_cache=False)),
        (["--kv-placement", "host"], Wanted(max_running=16, kv_placement="host")),
        (["--token-embedding-placement", "host"], Wanted(max_running=16, embedding_placement="host")),
        (["--chunked-prefill-size", "5", "--max-running-requests", "3"], Wanted(max_step_tokens=5, max_running=3)),
        (
            ["--vram-reserve-bytes", "3000000000", "--workers", "2"],
            Wanted(max_running=16, vram_reserve_nbytes=3 * GB, workers=2),
        ),
    ],
)
def test_the_flags_say_which_sizes_are_wanted(argv: list[str], sizes: Wanted) -> None:
    """Against Wanted's own words."""
    config = settings(*argv)
    assert wanted(config, config.workers) == sizes


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
    "moe_layers": 2, "experts": 512, "experts_per_token": 10, "slots": 1000, "stream_slots": 512, "bank_nbytes": 10**9,
    "pinned_nbytes": 10**9, "pool_nbytes": 1, "kv_tokens": 16, "kv_nbytes": 1, "kv_placement": "host",
    "max_model_len": 16, "demand_tokens": 512, "copy_engine": "thread", "event_loop": "uvloop", "state_slots": 32,
    "cache_policy": "lrfu", "deterministic": False, "verify_copies": False,
    "state_nbytes": 64_000_000,
}  # fmt: skip


def test_the_ready_block_says_which_device_and_why(made_up: Model) -> None:
    placement = Placement((H200,), "thread", "--device auto: a GPU was found", "GPU 0 cannot share its memory")
    block = ready_block(made_up, placement, Ready(FACTS), "tcp://127.0.0.1:1")
    for words in (
        "2 on cuda:0 NVIDIA H200, cuda:1 NVIDIA H200",
        "cuda, --device auto: a GPU was found",
        "pinned memory, copied by a thread: GPU 0 cannot share its memory",
        "16 tokens, 0.0 MB of pinned host memory; one request may take 16",
        "states      32 recurrent states, of requests and snapshots; 64.0 MB",
        "random weights",
        "; lrfu decides who makes way",
    ):
        assert words in block, block
    without = ready_block(made_up, placement, Ready(FACTS | {"state_slots": 0}), "tcp://127.0.0.1:1")
    assert "recurrent" not in without and "http" not in without.lower() and "repeat" not in without
    exact = ready_block(made_up, placement, Ready(FACTS | {"deterministic": True}), "tcp://127.0.0.1:1")
    assert "answers     repeat bit for bit, whatever else is served (--deterministic)" in exact
    checked = ready_block(made_up, placement, Ready(FACTS | {"verify_copies": True}), "tcp://127.0.0.1:1")
    assert "--verify-copies" not in without
    assert "checks      every expert is compared with what was loaded before it is computed with (--verify" in checked


def test_the_ready_block_says_where_http_is_served(made_up: Model) -> None:
    placement = Placement((), "process", "--device says so", "")
    block = ready_block(made_up, placement, Ready(FACTS), "tcp://127.0.0.1:1", "http://127.0.0.1:8000")
    assert "  HTTP        http://127.0.0.1:8000/v1\n  live page   http://127.0.0.1:8000/\n" in block
    assert "              curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{" in block
    keyed = ready_block(made_up, placement, Ready(FACTS), "tcp://127.0.0.1:1", "http://127.0.0.1:8000", True)
    assert "/v1/completions -H 'Authorization: Bearer KEY' -H 'Content-Type" in keyed


def test_the_front_is_told_what_launch_was(made_up: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag that both have, and the model by path and name; started anew it listens where its clients know it."""
    free_host_memory(monkeypatch, 20 * GB)
    http = ("--http-port", "0", "--http-host", "127.0.0.2", "--api-key", "k", "--http-max-body-bytes", "9")
    common = ("--device", "cpu", "--load-format", "dummy", "--model", str(made_up.directory), "--port", "0")
    config = settings(*common, *http, "--event-loop", "selector", "--log-level", "error")
    engine = launch.Engine(config, preflight(config, print), ProgressLine())
    for url, port in (("", 0), ("http://127.0.0.2:8123", 8123)):
        engine.url = url
        module, argv = engine.command("http", {"scheduler": "tcp://127.0.0.1:1"})
        assert module == "scheduler.http" and cli.parse(HttpConfig, argv, module) == HttpConfig(
            scheduler="tcp://127.0.0.1:1",
            model=str(made_up.directory),
            served_model_name=made_up.directory.name,
            http_host="127.0.0.2",
            http_port=port,
            api_key="k",
            http_max_body_bytes=9,
            event_loop="selector",
            log_level="error",
            parent_pipe=True,
        )


def test_scheduler_and_workers_are_told_that_answers_repeat(made_up: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    free_host_memory(monkeypatch, 20 * GB)
    common = ("--device", "cpu", "--load-format", "dummy", "--model", str(made_up.directory), "--port", "0")
    config = settings(*common, "--deterministic")
    engine = launch.Engine(config, preflight(config, print), ProgressLine())
    module, argv = engine.command("worker0", {"copyengine": "tcp://copyengine"})
    assert cli.parse(WorkerConfig, argv, module).deterministic
    module, argv = engine.command("scheduler", {"worker0": "tcp://worker0"})
    assert cli.parse(SchedulerConfig, argv, module).deterministic


@pytest.mark.parametrize(("pinned_nbytes", "words"), [(0, "only 0.0 MB"), (6 * 10**8, "only 600.0 MB")])
def test_the_ready_block_says_what_could_not_be_pinned(made_up: Model, pinned_nbytes: int, words: str) -> None:
    placement = Placement((H200,), "process", "--device auto: a GPU was found", "")
    block = ready_block(made_up, placement, Ready(FACTS | {"pinned_nbytes": pinned_nbytes}), "tcp://127.0.0.1:1")
    pageable = f"{(10**9 - pinned_nbytes) / 1e6:,.1f} MB"
    assert f"1,000.0 MB of host memory, of which {words} could be pinned: {pageable} are pageable" in block, block


def test_each_worker_is_told_its_gpu(made_up: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the command lines that the processes would be started with, where the second GPU cannot be used."""
    free_host_memory(monkeypatch, 20 * GB)
    pretend(monkeypatch, gpus(3)[::2])
    config = settings("--workers", "2", "--load-format", "dummy", "--model", str(made_up.directory), "--port", "0")
    found = preflight(config, print)
    engine = launch.Engine(config, found, ProgressLine())
    module, argv = engine.command("copyengine", {})
    assert module == "copyengine" and "--device=cuda" in argv
    for i in range(2):
        module, argv = engine.command(f"worker{i}", {"copyengine": "tcp://copyengine"})
        worker = cli.parse(WorkerConfig, argv, module)
        assert (module, worker.name, worker.device, worker.ordinal) == ("worker", f"worker{i}", "cuda", 2 * i)
        assert worker.copy_engine == "tcp://copyengine"
        assert not worker.deterministic
    module, argv = engine.command("scheduler", {"worker0": "tcp://worker0", "worker1": "tcp://worker1"})
    scheduler = cli.parse(SchedulerConfig, argv, module)
    assert (scheduler.load_format, scheduler.slots, scheduler.port) == ("dummy", found.budget.slots, 0)
    assert scheduler.workers == "tcp://worker0,tcp://worker1" and scheduler.kv_tokens == found.budget.kv_tokens


def test_a_scheduler_that_is_started_anew_listens_where_its_clients_know_it(
    made_up: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_host_memory(monkeypatch, 20 * GB)
    config = settings("--device", "cpu", "--load-format", "dummy", "--model", str(made_up.directory), "--port", "0")
    engine = launch.Engine(config, preflight(config, print), ProgressLine())
    engine.scheduler_endpoint = "tcp://127.0.0.1:5801"
    module, argv = engine.command("scheduler", {"worker0": "tcp://worker0"})
    assert cli.parse(SchedulerConfig, argv, module).port == 5801


def test_who_falls_with_whom() -> None:
    """Against DESIGN's rest_for_one: the rest behind a copy engine are the workers, who have none of their own."""
    process = Placement((), "process", "")
    assert launch.roles(2, process) == [
        Role("copyengine"),
        Role("worker0", needs=("copyengine",)),
        Role("worker1", needs=("copyengine",)),
        Role("scheduler", uses=("worker0", "worker1"), takes_requests=True),
    ]
    thread = Placement((), "thread", "")
    assert launch.roles(1, thread) == [Role("worker0"), Role("scheduler", uses=("worker0",), takes_requests=True)]
    assert launch.roles(1, thread, http=True)[2:] == [
        Role("http", calls=("scheduler",), takes_requests=True, spare=True)
    ]


@pytest.mark.parametrize("during", ["start", "serve", "stop"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (PeerDied("given up after 5 deaths in a row"), 1),
        (ConfigError("refused by a worker"), 2),
        (KeyboardInterrupt(), 0),
        (BrokenPipeError(), 1),
        (ZeroDivisionError("a bug"), 1),
    ],
)
def test_the_log_of_a_run_that_began_ends_with_its_exit_code(
    error: BaseException | None,
    code: int,
    during: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However it ends, and once all processes have ended."""

    class Ending:
        scheduler_endpoint = url = ""

        def __init__(self, *_: object) -> None: ...

        def told(self, _: str) -> None: ...

        def start(self) -> Ready:
            self.ends("start")
            return Ready({})

        def serve(self) -> int:
            self.ends("serve")
            return 0

        def stop(self) -> None:
            assert "event=end" not in caplog.text
            self.ends("stop")

        def ends(self, at: str) -> None:
            if at == during and error is not None:
                raise error

    placement = SimpleNamespace(device="cpu", reason="none other")
    found = SimpleNamespace(model=SimpleNamespace(directory=Path("m")), placement=placement)
    nothings = {"configure_logging": None, "on_signals": None, "ready_block": "", "preflight": found}
    for name, value in nothings.items():
        monkeypatch.setattr(launch, name, lambda *_, value=value: value)
    monkeypatch.setattr(launch, "Engine", Ending)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    with caplog.at_level("INFO"):
        if isinstance(error, ZeroDivisionError):
            with pytest.raises(ZeroDivisionError):
                launch.main([])
        else:
            assert launch.main([]) == code
    events = [record.getMessage() for record in caplog.records if record.name == "launch"]
    assert events[0].startswith("event=start ") and events[-1] == f"event=end code={code}"
    assert sum("event=end" in event for event in events) == 1


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (("--host", "0.0.0.0"), ("--host 0.0.0.0", "loopback")),
        (("--max-model-len", "100000000"), ("--max-model-len 100000000", "positions")),
        (("--max-model-len", "1"), ("--max-model-len 1", "need 2")),
        (("--api-key", "a"), ("--api-key", "only with --http-port")),
        (("--http-host", "127.0.0.2"), ("--http-host", "only with --http-port")),
        (("--http-max-body-bytes", "1"), ("--http-max-body-bytes", "only with --http-port")),
        (("--http-port", "0", "--api-key", "@nowhere"), ("--api-key @nowhere", "No such file")),
        (("--http-port", "0", "--http-host", "example.invalid"), ("--http-host example.invalid", "127.0.0.1")),
        (("--http-port", "0", "--prompt", "x"), ("--prompt", "--http-port")),
        (("--max-model-len", "100", "--kv-tokens", "64"), ("--max-model-len 100", "64 tokens")),
    ],
)
def test_what_the_scheduler_would_refuse_is_refused_before_anything_starts(
    made_up: Model, argv: tuple[str, ...], names: tuple[str, ...]
) -> None:
    common = ("--device", "cpu", "--load-format", "dummy", "--model", str(made_up.directory), "--port", "0")
    with pytest.raises(ConfigError) as refused:
        preflight(settings(*common, *argv), print)
    assert all(name in str(refused.value) for name in names)


def test_a_taken_port_is_refused_before_anything_starts(made_up: Model) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        common = ("--device", "cpu", "--load-format", "dummy", "--model", str(made_up.directory))
        with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{port}: .*--port"):
            preflight(settings(*common, "--port", port), print)
        with pytest.raises(ConfigError, match=f"cannot serve HTTP on http://127.0.0.1:{port}: .*--http-port"):
            preflight(settings(*common, "--port", "0", "--http-port", port), print)
    preflight(settings(*common, "--port", port), print)
    preflight(settings(*common, "--port", "0", "--http-port", port), print)


def test_a_check_starts_nothing_and_says_whether_a_start_would_go_through(
    made_up: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 with a table, or 2 with the table and one line that names a flag; the flag's value passes."""
    free_host_memory(monkeypatch, 20 * GB)
    monkeypatch.setattr(launch, "Engine", AssertionError("something is started"))
    common = ["--check", "--device", "cpu", "--load-format", "dummy", "--model", str(made_up.directory)]
    with socket.socket() as other:  # an engine may run already, where this one would listen
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert launch.main([*common, "--port", str(other.getsockname()[1])]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "host memory\n  expert banks" in out and "decode hit rate" in out and out.endswith("it fits\n")
    free_host_memory(monkeypatch, 10 * GB)
    assert launch.main([*common, "--kv-tokens", "10000000"]) == 2
    out, err = capsys.readouterr()
    assert "MISSING" in out and "it fits" not in out and err.count("\n") == 1
    fix = re.search(r"; use --kv-tokens (\d+) \(now 10000000\)", err)
    assert fix and launch.main([*common, "--kv-tokens", fix[1]]) == 0
    assert launch.main([*common, "--prompt", "a"]) == 2
    assert "--check" in capsys.readouterr().err


def test_a_check_of_gpus(made_up: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of those that are there; without one `--device cuda` stays refused."""
    free_host_memory(monkeypatch, 20 * GB)
    pretend(monkeypatch, gpus(2))
    monkeypatch.setattr(launch, "gpu_rate", lambda ordinal: LinkRate(50e9, f"of GPU {ordinal}"))
    common = ["--check", "--device", "cuda", "--load-format", "dummy", "--model", str(made_up.directory), "--port", "0"]
    assert launch.main([*common, "--workers", "2"]) == 0
    out, _ = capsys.readouterr()
    assert "memory of cuda:0 NVIDIA H200" in out and "memory of cuda:1 NVIDIA H200" in out
    assert "pinned expert banks" in out and "50.0 GB/s (measured: of GPU 0)" in out
    pretend(monkeypatch, [])
    assert launch.main(common) == 2
    assert "--device cuda: no GPU was found" in capsys.readouterr().err


def test_workers_share_the_cores_but_for_deterministic_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against counts by hand; those of a deterministic worker do not depend on how many there are."""
    for cores, workers, shared, own in ((None, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1), (9, 1, 8, 8), (9, 3, 2, 8)):
        monkeypatch.setattr("psutil.cpu_count", lambda logical, cores=cores: cores)
        assert launch.compute_threads(workers, False) == shared and launch.compute_threads(workers, True) == own


@pytest.mark.parametrize("value", ["0.0001", "0.999"])
def test_a_watchdog_that_would_kill_what_is_well_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"--watchdog-s {value}: .*1 at least, or 0"):
        cli.parse(LaunchConfig, ["--watchdog-s", value], "launch.py")
    for taken in ("0", "1", "20"):
        assert cli.parse(LaunchConfig, ["--watchdog-s", taken], "launch.py").watchdog_s == float(taken)
