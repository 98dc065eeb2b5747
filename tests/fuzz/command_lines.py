"""Flags of all commands: a config that states itself again, or a refusal by name; of the quantiser also its inputs."""

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

from copyengine.checkpoint import quantise
from copyengine.config import CopyEngineConfig
from copyengine.wire import cli
from copyengine.wire.errors import ConfigError
from scheduler.config import LaunchConfig, SchedulerConfig
from scheduler.http.config import HttpConfig
from tests.copyengine.families.test_parse_spec import SMALL
from tests.fuzz.source import NASTY, Source, as_json, changed
from worker.config import WorkerConfig

CONFIGS: list[Any] = [LaunchConfig, SchedulerConfig, HttpConfig, WorkerConfig, CopyEngineConfig]
VALUES = [str(value) for value in NASTY] + [
    "auto",
    "cpu",
    "1e9",
    "0x10",
    "١٢",
    "+1",
    "1_000",
    " 1 ",
    "-0",
    "NaN",
    "127.0.0.1",
]
QUANTISE = (
    "--format",
    "--dialect",
    "--block",
    "--shard-mb",
    "nvfp4",
    "fp8_block",
    "mxfp4",
    "128,128",
    "0,0",
    "-1",
    "hub",
)


def one_input(data: bytes) -> None:
    source = Source(data)
    if source.byte() < 40:
        return _quantise(source)
    config = source.pick(CONFIGS)
    flags = sorted(flag for action in cli.parser_for(config, "x")._actions for flag in action.option_strings)
    argv: list[str] = []
    for _ in range(source.byte() % 6):
        value = source.pick(VALUES) if source.byte() < 200 else source.chunk().decode("utf-8", "surrogateescape")
        flag = source.pick(flags)
        argv += [f"{flag}={value}"] if source.byte() & 1 else [flag, value]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            stated = cli.parse(config, argv, "x")
    except ConfigError as error:
        str(error).encode()
        return
    except SystemExit as told:
        assert told.code == 0 and {"-h", "--help"} & {part.split("=")[0] for part in argv}
        return
    assert cli.parse(config, cli.to_argv(stated), "x") == stated or "nan" in repr(stated)


def _quantise(source: Source) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_bytes(as_json(source, changed(source, SMALL)))
        argv = [name, f"{name}/out", "--format", "nvfp4", *(source.pick(QUANTISE) for _ in range(source.byte() % 5))]
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                code = quantise.main(argv)
            except SystemExit as told:  # argparse's own refusal
                code = int(told.code or 0)
        assert code in (1, 2) and "Traceback" not in said.getvalue(), said.getvalue()
