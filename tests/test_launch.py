"""The command line: frozen here, so that a flag is changed on purpose. Checked against README's promises."""

import pytest

import launch
from copyengine.wire import cli
from copyengine.wire.errors import ConfigError

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
        (["--copy-engine", "thread", "--workers", "2"], ["--copy-engine", "--workers"]),
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
