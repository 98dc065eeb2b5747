"""The loop that runs against the one that was asked for, and what a signal does to it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from copyengine.wire.errors import ConfigError
from copyengine.wire.loop import SelectorLoop, loop_factory, resolve, run
from tests.e2e.windows import CONDITIONS, ROOT

WAITING = """
import asyncio
async def main():
    print("waiting", flush=True)
    await asyncio.Event().wait()
with asyncio.Runner(loop_factory={factory}) as runner:
    runner.run(main())
"""


async def running() -> str:
    return type(asyncio.get_running_loop()).__module__.split(".")[0].replace("copyengine", "asyncio")


def test_selector_is_never_anything_else() -> None:
    assert resolve("selector") == "selector" and run(running(), "selector") == "asyncio"
    assert loop_factory("selector") is SelectorLoop and issubclass(SelectorLoop, asyncio.SelectorEventLoop)


def test_uvloop_where_it_is_installed() -> None:
    pytest.importorskip("uvloop")
    assert resolve("auto") == resolve("uvloop") == "uvloop"
    assert run(running(), "auto") == run(running(), "uvloop") == "uvloop"


def test_without_uvloop_auto_falls_back_and_uvloop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)  # as if it were not installed
    assert resolve("auto") == "selector" and run(running(), "auto") == "asyncio"
    with pytest.raises(ConfigError, match="--event-loop uvloop"):
        loop_factory("uvloop")


def test_the_result_and_the_error_of_main_come_back() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(fail(), "selector")


def until_asleep(pid: int) -> None:
    deadline_s = time.monotonic() + 30
    while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform == "win32", reason="how a test sends Ctrl-C")
@pytest.mark.parametrize(
    ("factory", "seen"),
    [("asyncio.SelectorEventLoop", False), ("__import__('copyengine.wire.loop').wire.loop.SelectorLoop", True)],
)
def test_ctrl_c_is_seen_where_a_signal_ends_no_wait(factory: str, seen: bool) -> None:
    """As on Windows. Against the plain loop, which sleeps on."""
    code = WAITING.format(factory=factory)
    argv, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, env=os.environ | CONDITIONS, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"waiting\n"
            until_asleep(process.pid)
            process.send_signal(signal.SIGINT)
            if seen:
                assert b"KeyboardInterrupt" in process.communicate(timeout=30)[1]
            else:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.5)
        finally:
            process.kill()


def test_a_loop_gives_back_what_it_took() -> None:
    """The wakeup descriptor and its sockets (left open, they would warn); in another thread it takes none."""
    run(running(), "selector")
    assert signal.set_wakeup_fd(-1) == -1
    kinds: list[str] = []
    thread = threading.Thread(target=lambda: kinds.append(run(running(), "selector")))
    thread.start()
    thread.join()
    assert kinds == ["asyncio"]
