"""How a real process ends that does not start, against who is told of it."""

import subprocess
import sys

import pytest

from copyengine.wire.lifecycle import EXIT_CONFIG, StartFailed, parse_event

MAIN = """
import sys
from copyengine.wire.errors import *
from copyengine.wire.process import run_process
async def main(orders):
    raise {error}
sys.exit(run_process(main, "selector", parent_pipe={parent_pipe}))
"""


def run(error: str, parent_pipe: bool) -> "subprocess.CompletedProcess[str]":
    code = MAIN.format(error=error, parent_pipe=parent_pipe)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, input="")


@pytest.mark.parametrize("parent_pipe", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [("ConfigError('no good')", "config", EXIT_CONFIG), ("PeerDied('no good')", "peer_died", 1)],
)
def test_a_start_that_fails_is_told_once(error: str, code: str, exit_code: int, parent_pipe: bool) -> None:
    """Announced in any case; on standard error only where no parent will say it."""
    done = run(error, parent_pipe)
    assert done.returncode == exit_code
    assert [parse_event(line.encode()) for line in done.stdout.splitlines()] == [StartFailed(code, "no good")]
    assert done.stderr == ("" if parent_pipe else "error: no good\n")


@pytest.mark.parametrize(
    ("error", "code", "detail"),
    [
        ("ExceptionGroup('tasks', [ExceptionGroup('more', [ValueError('a bug')])])", "internal", "ValueError: a bug"),
        ("ExceptionGroup('tasks', [PeerDied('gone')])", "peer_died", "gone"),
        (
            "ExceptionGroup('tasks', [KeyError(1), KeyError(2)])",
            "internal",
            "ExceptionGroup: tasks (2 sub-exceptions)",
        ),
    ],
)
def test_what_one_of_several_tasks_failed_of_is_announced_as_itself(error: str, code: str, detail: str) -> None:
    done = run(error, True)
    assert done.returncode == 1
    assert parse_event(done.stdout.encode()) == StartFailed(code, detail)


def test_a_bug_is_announced_and_leaves_its_traceback() -> None:
    done = run("ZeroDivisionError('a bug')", True)
    assert done.returncode == 1
    assert parse_event(done.stdout.encode()) == StartFailed("internal", "ZeroDivisionError: a bug")
    assert done.stderr.count("Traceback") == 1
