"""Start and end of the engine, seen from outside: exit codes, what is printed, what is left behind."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from copyengine.device import ledger
from copyengine.wire.errors import RequestRefused
from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.e2e.engine import ROOT, gone, launch_command, running

QUESTION = ("--prompt", "Hi")  # an answer of some twenty tokens


def segments_of(processes: list[psutil.Process]) -> list[str]:
    """Names of the shared memory that these processes own."""
    pids = {str(process.pid) for process in processes}
    return [path.name for path in ledger.directory().iterdir() if path.name.split("@")[1:2][0] in pids]


def launch(*flags: str, timeout: float = 60.0) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        launch_command(*flags), cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_all(sign: int) -> None:
    with running("--slots", "64") as engine:
        children = engine.children()
        assert len(children) >= 3 and segments_of(children)
        assert engine.stop(sign) == 0
        assert gone(children, 2.0)
        assert not segments_of(children)
        assert "Traceback" not in engine.text() and "leaked" not in engine.text()


def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    """All tokens of the answer that was running come, the next request is told why not, and the exit code is 0."""
    wanted = Sampling(max_tokens=120, ignore_eos=True)

    async def session(client: Client) -> None:
        answer = client.generate(token_ids=[5] * 20, sampling=wanted)
        pieces = aiter(answer)
        tokens = list((await anext(pieces)).token_ids)
        engine.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + 10
        while (await client.health()).phase != "draining":
            assert time.monotonic() < deadline_s, engine.text()
        with pytest.raises(RequestRefused) as refused:
            await anext(aiter(client.generate(token_ids=[5], sampling=wanted)))
        assert refused.value.code == "draining"
        tokens += [token async for piece in pieces for token in piece.token_ids]
        assert len(tokens) == 120 and answer.finished and answer.finished.reason == "length"

    with running("--slots", "64") as engine:
        children = engine.children()
        engine.over(session)
        assert engine.wait() == 0
        assert gone(children, 2.0) and not segments_of(children)


def test_a_second_signal_stops_a_drain() -> None:
    """With an answer running that takes far longer than the test may."""
    with running("--slots", "64") as engine:
        children = engine.children()
        argv = [sys.executable, "-m", "scheduler.client", "Once", "--endpoint", engine.endpoint]
        with subprocess.Popen([*argv, "--max-tokens", "8000", "--ignore-eos"], cwd=ROOT, stdout=subprocess.PIPE) as ask:
            assert ask.stdout is not None and ask.stdout.read(1)
            engine.process.send_signal(signal.SIGTERM)
            deadline_s = time.monotonic() + 10
            while "finishing running requests" not in engine.text() and time.monotonic() < deadline_s:
                time.sleep(0.02)
            assert engine.process.poll() is None and ask.poll() is None
            assert engine.stop(signal.SIGTERM) == 0
            ask.stdout.read()
        assert ask.returncode == 1
        assert gone(children, 2.0) and not segments_of(children)


def test_a_signal_ends_a_prompt_that_is_being_answered() -> None:
    argv = launch_command("--prompt", "Once upon a time")
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stderr:
            if line.startswith("  try"):
                break
        process.stdout.read(1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 130
        assert "Traceback" not in process.stderr.read()
    assert gone(children, 2.0) and not segments_of(children)


def test_a_killed_launcher_leaves_nothing() -> None:
    with running("--slots", "64", "--http-port", "0") as engine:
        children = engine.children()
        ports = [int(address.rsplit(":", 1)[1]) for address in (engine.endpoint, engine.url)]
        engine.stop(signal.SIGKILL)
        assert gone(children, 10.0)
        assert not segments_of(children)
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))


def test_prompt_answers_once() -> None:
    done = launch(*QUESTION)
    assert done.returncode == 0, done.stderr
    assert "Ready in" in done.stderr and "Ready in" not in done.stdout
    assert "new tokens" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("copy_engine", ["process", "thread"])
@pytest.mark.parametrize("event_loop", ["uvloop", "selector"])
def test_every_event_loop_with_every_place_of_the_copy_engine(event_loop: str, copy_engine: str) -> None:
    done = launch("--event-loop", event_loop, "--copy-engine", copy_engine, *QUESTION)
    assert done.returncode == 0, done.stderr
    assert f"event loop  {event_loop}" in done.stderr and f"copied by a {copy_engine}" in done.stderr
    assert "Traceback" not in done.stderr and "leaked" not in done.stderr


def test_a_taken_port_is_refused_by_its_number() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        start_s = time.monotonic()
        done = launch("--port", port)
    assert done.returncode == 2 and time.monotonic() - start_s < 40
    assert port in done.stderr and "Traceback" not in done.stderr and done.stderr.count("error: ") == 1


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--host", "0.0.0.0"), ("--host", "loopback")),
        (("--slots", "4"), ("--slots 4", "64")),
        (("--max-model-len", "100000000"), ("--max-model-len",)),
        (("--max-model-len", "1"), ("--max-model-len 1",)),
        (("--hf-overrides", '{"num_experts_per_tok": 99}'), ("num_experts_per_tok", "99")),
    ],
)
def test_a_refused_start_exits_with_2(flags: tuple[str, ...], names: tuple[str, ...]) -> None:
    done = launch(*flags)
    assert done.returncode == 2
    assert all(name in done.stderr for name in names) and "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1


def test_a_start_that_takes_too_long_names_the_knob() -> None:
    done = launch("--ready-timeout-s", "0.01")
    assert done.returncode == 1
    assert "--ready-timeout-s" in done.stderr and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


def test_a_damaged_checkpoint_is_refused_by_name(cache: Path, tmp_path: Path) -> None:
    source = next(path.parent for path in cache.rglob("config.json"))
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    shard = next(tmp_path.glob("*.safetensors"))
    data = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(data[: len(data) // 2])
    done = launch("--model", str(tmp_path))
    assert done.returncode == 2 and shard.name in done.stderr and "Traceback" not in done.stderr
