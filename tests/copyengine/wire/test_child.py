"""Children of a launcher-like parent with a process group of its own, against what a terminal or a kill does to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups as POSIX has them")

PARENT = """
import queue, signal, sys
from copyengine.wire.child import Child
signals = queue.SimpleQueue()
signal.signal(signal.SIGINT, lambda *_: signals.put("interrupted"))
child = Child("child", "slow_child", [], queue.SimpleQueue())
print(child.pid, flush=True)
print(signals.get(), child.alive, flush=True)
print(child.stop(), flush=True)
"""

CHILD = """
import sys, time
print("importing", file=sys.stderr, flush=True)
time.sleep(0.5)  # as heavy imports do; no signal is handled yet
sys.stdin.read()
sys.exit(7)
"""


@contextmanager
def launcher(directory: Path) -> Iterator[tuple["subprocess.Popen[str]", psutil.Process]]:
    """A parent in a session of its own, and its child, which still imports."""
    (directory / "slow_child.py").write_text(CHILD, "utf-8")
    paths = os.pathsep.join([str(directory), str(Path(__file__).parents[3])])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            assert parent.stderr.readline() == "importing\n"
            yield parent, child
        finally:
            for process in (parent, child):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def test_ctrl_c_during_a_childs_start_reaches_the_parent_alone(tmp_path: Path) -> None:
    with launcher(tmp_path) as (parent, _):
        os.killpg(parent.pid, signal.SIGINT)
        out, errors = parent.communicate(timeout=30)
        assert out.split() == ["interrupted", "True", "7"], "alive after Ctrl-C, then ended by its pipe"
        assert errors == ""


def test_a_child_goes_on_while_its_parent_is_stopped(tmp_path: Path) -> None:
    with launcher(tmp_path) as (parent, child):
        os.killpg(parent.pid, signal.SIGSTOP)  # as Ctrl-Z, which a kernel ignores in a group without a shell
        deadline = time.monotonic() + 10
        while psutil.Process(parent.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
        assert child.status() != psutil.STATUS_STOPPED


def test_a_killed_parent_takes_its_child_along(tmp_path: Path) -> None:
    with launcher(tmp_path) as (parent, child):
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait(30)
        deadline = time.monotonic() + 10
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
