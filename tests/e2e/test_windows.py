"""Start and end of the engine in Windows' conditions, as far as Linux can have them (windows_shim/sitecustomize.py).

What it answers there is in test_serving.py and test_frames.py, which run in these conditions too.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from copyengine.wire.errors import RequestRefused
from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.e2e import test_against_transformers as transformers
from tests.e2e import test_lifecycle as lifecycle
from tests.e2e import test_restarts as restarts
from tests.e2e.engine import Engine, gone, running
from tests.e2e.windows import CONDITIONS, ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it takes away from Linux")


@pytest.fixture(autouse=True)
def conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All children of a test live in them."""
    for name, value in CONDITIONS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delattr(os, "getuid")  # the ledger of shared memory is found by the user's name


def harmless(text: str) -> bool:
    """Whether a process that printed `text` really ran in these conditions, and minded none of them."""
    ours = re.escape(str(ROOT)) + r"(?!\S*site-packages)\S*: EncodingWarning"  # a venv may lie in it
    return not any(word in text for word in ("Traceback", "sitecustomize", "leaked")) and not re.search(ours, text)


GONE = {
    "import uvloop": "ModuleNotFoundError",
    "import triton.language": "ModuleNotFoundError",
    "import fcntl": "ModuleNotFoundError",
    "from resource import getrusage": "ModuleNotFoundError",
    "import os; os.fork()": "AttributeError",
    "import multiprocessing as m; m.get_context('fork').Process().start()": "AttributeError",
    "import os; os.posix_fadvise(0, 0, 0, 0)": "AttributeError",
    "import os; os.kill(os.getpid(), 0)": "OSError",
    "import signal; signal.SIGKILL": "AttributeError",
    "import signal; signal.SIGHUP": "AttributeError",
    "import socket; socket.socket(socket.AF_UNIX)": "OSError",
    "import asyncio; asyncio.SelectorEventLoop().add_signal_handler(2, print)": "NotImplementedError",
    "import asyncio; asyncio.run(asyncio.create_subprocess_exec('true'))": "NotImplementedError",
    "import asyncio, os; asyncio.SelectorEventLoop().add_reader(os.pipe()[0], print)": "OSError",
    "import sys; sys.stdout.write('日')": "UnicodeEncodeError",
}
"""Statements, and what Windows has to say to each."""


def test_the_conditions_are_in_force() -> None:
    """Each statement fails as it does on Windows."""
    tries = "\n".join(
        f"try:\n  exec({line!r}, {{}})\nexcept BaseException as e:\n  print(type(e).__name__)\nelse:\n  print('works')"
        for line in GONE
    )
    done = subprocess.run([sys.executable, "-c", tries], capture_output=True, text=True, timeout=60, check=True)
    assert dict(zip(GONE, done.stdout.split(), strict=True)) == GONE


def test_what_replaces_it_works() -> None:
    """Two connected sockets, a child that is ended, a child in the same conditions."""
    code = """
import asyncio, socket, subprocess, sys
one, other = socket.socketpair()
one.send(b"x")
assert other.recv(1) == b"x" and one.family == socket.AF_INET
with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
    runner.run(asyncio.sleep(0))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
child.terminate()
assert child.wait(30) != 0
print(subprocess.run([sys.executable, "-c", "import os; print(hasattr(os, 'fork'))"], stdout=-1).stdout.decode())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.returncode) == (["False"], 0), done.stderr


def test_uvloop_is_refused_where_there_is_none() -> None:
    done = lifecycle.launch("--event-loop", "uvloop")
    assert done.returncode == 2 and "--event-loop uvloop" in done.stderr and harmless(done.stderr)


def all_in_conditions(engine: Engine) -> bool:
    return all(child.environ()["PYTHONPATH"] == CONDITIONS["PYTHONPATH"] for child in engine.children())


def test_the_dead_are_started_anew_and_ctrl_c_ends_first_a_client_and_then_it_all() -> None:
    """The client in mid-answer, which is aborted. The engine chooses the loop itself, has its copy engine as a thread,
    as where device memory cannot be shared, and a name that the pipe's encoding lacks."""
    with running("--slots", "64", "--copy-engine", "thread", "--served-model-name", "日本") as engine:
        assert engine.fact("event loop") == "selector" and engine.fact("model").startswith("?? ")
        before = asyncio.run(answer(engine.endpoint))
        next(child for child in engine.children() if "worker" in child.cmdline()).kill()
        assert asyncio.run(answer(engine.endpoint)) == before

        argv = [sys.executable, "-m", "scheduler.client", "Once", "--endpoint", engine.endpoint, "--ignore-eos"]
        with subprocess.Popen([*argv, "--max-tokens", "8000"], cwd=ROOT, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None and client.stdout.read(1)
            client.send_signal(signal.SIGINT)
            assert client.wait(30) == 130
        assert asyncio.run(nothing_runs(engine.endpoint))

        children = engine.children()
        assert len(children) >= 2 and lifecycle.segments_of(children) and all_in_conditions(engine)
        assert engine.stop(signal.SIGINT) == 0
        assert gone(children, 2.0) and not lifecycle.segments_of(children)
        assert harmless(engine.text()), engine.text()


async def answer(endpoint: str) -> list[int]:
    """Three tokens, as soon as the engine has them."""
    async with Client(endpoint) as client:
        for _ in range(600):
            question = client.generate(token_ids=[5, 6, 7], sampling=Sampling(max_tokens=3, ignore_eos=True))
            try:
                return [token async for piece in question for token in piece.token_ids]
            except RequestRefused:
                await asyncio.sleep(0.1)
    raise AssertionError("no answer for a minute")


async def nothing_runs(endpoint: str) -> bool:
    """Whether the engine soon has no request any more."""
    async with Client(endpoint) as client:
        for _ in range(500):
            if not (await client.stats()).running:
                return True
            await asyncio.sleep(0.02)
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        lifecycle.test_a_killed_launcher_leaves_nothing,
        lifecycle.test_prompt_answers_once_and_of_two_starts_at_one_moment_one_is_refused,
        lifecycle.test_a_taken_port_is_refused_by_its_number,
        lifecycle.test_a_start_that_takes_too_long_names_the_knob,
        restarts.test_one_worker_and_each_process_killed_under_load,
        restarts.test_two_workers_share_the_banks_and_do_not_share_a_death,
    ],
)
def test_the_lifecycle_is_the_same(test: Callable[[], None]) -> None:
    test()


@pytest.mark.slow
def test_two_workers_continue_as_transformers_does(goldens: Path) -> None:
    transformers.test_the_continuation_is_token_for_token_the_same(
        goldens, "e128_k8_sharded", 512, transformers.SMALL_CHUNKS
    )
