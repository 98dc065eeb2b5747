"""How a real process ends that does not start, against who is told of it."""

import subprocess
import sys

import pytest

from copyengine.wire.lifecycle import EXIT_CONFIG, Alive, Ready, StartFailed, parse_event

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


def test_a_bug_is_announced_and_its_place_is_logged() -> None:
    done = run("ZeroDivisionError('a bug')", True)
    assert done.returncode == 1
    assert parse_event(done.stdout.encode()) == StartFailed("internal", "ZeroDivisionError: a bug")
    assert done.stderr.count("event=process_failed error=ZeroDivisionError") == 1 and "Traceback" not in done.stderr


ANSWERS = """
import asyncio, sys, time
from copyengine.wire import lifecycle
from copyengine.wire.lifecycle import Ready, announce
from copyengine.wire.process import run_process
lifecycle.STOP_GRACE_S = 0.3
async def main(orders):
    announce(Ready({}))
    await orders.drain.wait()
    announce(Ready({}))
    time.sleep(60)  # the loop hangs, and the thread that reads orders does not
sys.exit(run_process(main, sys.argv[1], parent_pipe=True))
"""


@pytest.mark.parametrize("event_loop", ["selector", "uvloop"])
def test_a_loop_that_turns_says_that_it_is_alive_and_one_that_hangs_does_not(event_loop: str) -> None:
    """Each question has one answer; an end of input ends also what hangs."""
    if event_loop == "uvloop":
        pytest.importorskip("uvloop")
    with subprocess.Popen(
        [sys.executable, "-c", ANSWERS, event_loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert parse_event(process.stdout.readline()) == Ready({})
        for _ in range(3):
            process.stdin.write(b"alive\n")
            process.stdin.flush()
            assert parse_event(process.stdout.readline()) == Alive()
        process.stdin.write(b"drain\n")
        process.stdin.flush()
        assert parse_event(process.stdout.readline()) == Ready({})
        process.stdin.write(b"alive\n")
        process.stdin.close()
        assert process.stdout.read() == b"" and process.wait(30) == 1
