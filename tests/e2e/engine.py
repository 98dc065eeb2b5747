"""The engine as a user has it: launch.py and the client command as child processes."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from scheduler.client import Client
from scheduler.protocol import StatsReply

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 60.0
CUDA_START_TIMEOUT_S = 240.0
"""Of a first start on a GPU, which compiles kernels for up to two minutes."""
RESTART_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


class Engine:
    """One running launch.py."""

    def __init__(self, process: "subprocess.Popen[str]", env: dict[str, str] | None = None) -> None:
        self.process = process
        self.env = env or {}  # what it was started with beyond this process's own
        self.output: list[str] = []
        self.errors: list[str] = []
        self._ready = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(process.stdout, self.output), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr, self.errors), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if line.startswith("  try"):  # the last line of the Ready block
                self._ready.set()
        if lines is self.output:
            self._ready.set()

    def wait_ready(self, timeout_s: float) -> None:
        """AssertionError with all that was printed if it does not get ready."""
        self._ready.wait(timeout_s)
        ready = any(line.startswith("  try") for line in self.output)
        assert ready, f"not ready after {timeout_s:g} s:\n{self.text()}"

    def text(self) -> str:
        """All that it printed so far."""
        return "\n".join([*self.output, *self.errors])

    @property
    def endpoint(self) -> str:
        """The scheduler's, as the Ready block states it."""
        found = re.search(r"tcp://127\.0\.0\.1:\d+", "\n".join(self.output))
        assert found, self.text()
        return found.group()

    @property
    def workers(self) -> int:
        """How many it was started with."""
        flags = [str(flag) for flag in self.process.args] if isinstance(self.process.args, list) else []
        return int(flags[flags.index("--workers") + 1]) if "--workers" in flags else 1

    def fact(self, name: str) -> str:
        """The Ready block's line called `name`."""
        return next(line for line in self.output if line.startswith(f"  {name} "))[2 + len(name) :].strip()

    def wait_for(self, met: Callable[[], bool], timeout_s: float = RESTART_TIMEOUT_S) -> None:
        """Until that is so; AssertionError with all that was printed if it does not become so."""
        end_s = time.monotonic() + timeout_s
        while not met():
            assert time.monotonic() < end_s and self.process.poll() is None, self.text()
            time.sleep(0.02)

    def wait_serving_again(self, times: int) -> None:
        """Until it has said so `times` times."""
        self.wait_for(lambda: sum("serving again" in line for line in self.errors) >= times)

    @property
    def url(self) -> str:
        """The HTTP front's, as the Ready block states it, without a path."""
        return self.fact("HTTP").removesuffix("/v1")

    def child(self, name: str) -> psutil.Process:
        """The process called `name` that runs now: copyengine, worker0, ..., scheduler, http."""
        module = "scheduler.http" if name == "http" else name.rstrip("0123456789")
        for process in self.children():
            with contextlib.suppress(psutil.Error):
                argv = process.cmdline()
                called = next((flag for flag in argv if flag.startswith("--name=")), "--name=worker0")
                if module in argv and (module != "worker" or called == f"--name={name}"):
                    return process
        raise AssertionError(f"no {name}: {self.text()}")

    def children(self) -> list[psutil.Process]:
        """All processes below launch.py."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def over(self, session: Callable[[Client], Awaitable[None]]) -> None:
        """Run `session` with a client of this engine, to its end."""

        async def main() -> None:
            async with Client(self.endpoint) as client:
                await session(client)

        asyncio.run(main())

    def stats(self) -> StatsReply:
        """What it counted so far."""
        found: list[StatsReply] = []

        async def session(client: Client) -> None:
            found.append(await client.stats())

        self.over(session)
        return found[0]

    def stop(self, sign: int = signal.SIGINT) -> int:
        """Send `sign` and wait; the exit code."""
        self.process.send_signal(sign)
        return self.wait()

    def wait(self) -> int:
        """The exit code; AssertionError if it does not end in time."""
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"launch.py did not end:\n{self.text()}") from None
        for reader in self._readers:
            reader.join(STOP_TIMEOUT_S)
        return code


def launch_command(*flags: str) -> list[str]:
    """launch.py on a free port with `flags`; on the CPU, also where there is a GPU, unless they say otherwise."""
    device = () if "--device" in flags else ("--device", "cpu")
    port = () if "--port" in flags else ("--port", "0")
    return [sys.executable, str(ROOT / "launch.py"), *port, *device, *flags]


@contextmanager
def running(*flags: str, env: dict[str, str] | None = None, ready_s: float | None = None) -> Iterator[Engine]:
    """A ready engine, stopped at the end whatever happens; AssertionError if it is not ready in `ready_s`."""
    with subprocess.Popen(
        launch_command(*flags),
        cwd=ROOT,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        engine = Engine(process, env)
        try:
            engine.wait_ready(ready_s or (CUDA_START_TIMEOUT_S if "cuda" in flags else START_TIMEOUT_S))
            yield engine
        finally:
            if process.poll() is None:
                engine.stop()


def command(module: str, *args: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Run `python -m module args` to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=START_TIMEOUT_S,
        check=False,
    )


def gone(processes: Sequence[psutil.Process], within_s: float) -> bool:
    """Whether all `processes` end within `within_s`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes if p.is_running()):
            return True
        time.sleep(0.05)
    return False


def json_lines(text: str) -> list[dict[str, Any]]:
    """One object per line."""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def own_nbytes(process: psutil.Process) -> int:
    """Memory of a process that belongs to no file, where the system tells it; elsewhere what is no other process's.

    The latter has the pages of libraries in it that nobody else has mapped at the moment, and jumps by 100 MB when
    another process with torch ends. Raises what psutil does if the process has ended.
    """
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text("ascii").splitlines()
    except OSError:
        return int(process.memory_full_info().uss)
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))
