"""README, ARCHITECTURE and SECURITY against the tree: the tests they name exist, the commands are the ones CI runs."""

import re
from pathlib import Path

from copyengine.wire import cli
from scheduler.config import LaunchConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text("utf-8")


def test_every_test_that_is_named_exists() -> None:
    paths = list((ROOT / "tests").rglob("test_*.py"))
    files = {path.name for path in paths}
    functions = {name for path in paths for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))}
    named = re.findall(r"`([^`]*)`", README + ARCHITECTURE + SECURITY)
    for name in (name for text in named for name in re.findall(r"\btest_\w+(?:\.py)?", text)):
        assert name in (files if name.endswith(".py") else functions), name


def test_ci_runs_the_readmes_test_command() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()


def test_the_readmes_flags_exist() -> None:
    parser = cli.parser_for(LaunchConfig, "launch.py")
    known = {flag for action in parser._actions for flag in action.option_strings}
    for line in (line for line in README.splitlines() if "python launch.py" in line):
        assert set(re.findall(r"launch\.py.*?(--[\w-]+)", line)) <= known
