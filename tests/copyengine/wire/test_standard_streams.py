"""Processes that are started with closed standard streams, against what a shell shows of one with all three."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from copyengine.wire.standard_streams import open_closed_streams

CODE = """
import os, sys
from copyengine.wire.standard_streams import open_closed_streams
open_closed_streams()
next_one = os.open(os.devnull, os.O_RDONLY)
print("lost", file=sys.stdout, flush=True)
print("lost", file=sys.stderr, flush=True)
with open(sys.argv[1], "w") as out:
    print(next_one > 2, sys.stdin.read() == "", [os.get_inheritable(fd) for fd in range(3)], file=out)
"""

posix_shell = pytest.mark.skipif(sys.platform == "win32", reason="closes descriptors by a POSIX shell")


def closed(which: str, *command: str) -> "subprocess.CompletedProcess[str]":
    """`command`, started by a shell with `which` redirections."""
    shell = ["sh", "-c", f'exec "$@" {which}', "sh", *command]
    return subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


@posix_shell
@pytest.mark.parametrize("which", ["", "<&-", ">&-", "2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lead_nowhere_and_leave_their_numbers_to_nobody(which: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    assert closed(which, sys.executable, "-c", CODE, str(seen)).returncode == 0
    assert seen.read_text() == "True True [True, True, True]\n"


@posix_shell
@pytest.mark.parametrize("command", [("launch.py",), ("-m", "scheduler.client_cli")], ids=["launch", "client"])
def test_the_commands_end_with_their_exit_code_although_they_cannot_say_why(command: tuple[str, ...]) -> None:
    """Of a flag that there is not: 2, as with a standard error; nothing of it comes to another stream."""
    done = closed("2>&-", sys.executable, *command, "--no-such-flag")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_stream_that_python_has_not_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Windows without a console."""
    monkeypatch.setattr(sys, "stderr", None)
    open_closed_streams()
    assert sys.stderr is not None and sys.stderr.name == os.devnull
    sys.stderr.close()
