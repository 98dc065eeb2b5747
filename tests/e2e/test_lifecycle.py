"""Start and end of the engine, seen from outside: exit codes, what is printed, what is left behind."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from copyengine.device import ledger
from scheduler.client import Client
from tests.e2e.engine import ROOT, Engine, gone, launch_command, running
from tests.e2e.streams import END_S, Stream, answers, under_way, until_health

SECOND_SIGNAL_S = 2.0
"""Seconds within which a second signal has ended it all."""

SECOND_START_S = 5.0
"""Seconds within which a start on a taken port is refused."""

ROOM = 4.0
"""What these are multiplied by: Python's own start and end take several times as long on a loaded machine."""

QUESTION = ("--prompt", "Hi")  # an answer of some twenty tokens


def segments_of(processes: list[psutil.Process]) -> list[str]:
    """Names of the shared memory that these processes own."""
    pids = {str(process.pid) for process in processes}
    return [path.name for path in ledger.directory().iterdir() if set(path.name.split("@")[1:2]) & pids]


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
    """All of the answers that were running come, which are what they were before, the next requests are told why not,
    and the exit code is 0: by ZMQ and by HTTP."""

    async def session(client: Client) -> None:
        expected = await answers(engine, client, 4, 4, 60)
        async with under_way(engine, client, 4, 4, 60) as streams:
            engine.process.send_signal(signal.SIGTERM)
            await until_health(engine, client, ready=False)
            late = Stream(9), Stream(9)
            async with httpx.AsyncClient(base_url=engine.url, timeout=10) as http:
                await asyncio.gather(late[0].by_zmq(client, 1), late[1].by_http(http, 1))
            assert [stream.end for stream in late] == ["draining", "draining"]
            assert all("takes nothing new" in stream.why for stream in late)
            assert not all(stream.end for stream in (*streams.zmq, *streams.http)), "they were refused under load"
            await streams.over()
        assert [stream.answer for stream in (*streams.zmq, *streams.http)] == expected

    with running("--slots", "64", "--http-port", "0") as engine:
        children = engine.children()
        engine.over(session)
        assert engine.wait() == 0
        assert gone(children, 2.0) and not segments_of(children)


def test_a_second_signal_stops_a_drain() -> None:
    """With answers running that take far longer than the test may: each is told that the engine stops."""

    async def session(client: Client) -> None:
        async with under_way(engine, client, 4, 4) as streams:
            engine.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(engine.wait_for, lambda: "finishing running requests" in engine.text())
            await until_health(engine, client, ready=False)
            assert not any(stream.end for stream in (*streams.zmq, *streams.http))
            start_s = time.monotonic()
            assert await asyncio.to_thread(engine.stop, signal.SIGTERM) == 0
            assert time.monotonic() - start_s < SECOND_SIGNAL_S * ROOM
            await streams.over()
        assert {stream.end for stream in (*streams.zmq, *streams.http)} == {"draining"}
        assert {stream.why.partition(": ")[2] or stream.why for stream in (*streams.zmq, *streams.http)} == {
            "the engine is stopping"
        }

    with running("--slots", "64", "--http-port", "0") as engine:
        children = engine.children()
        engine.over(session)
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
    """Under load; clients are told at once."""

    async def session(client: Client) -> None:
        async with under_way(engine, client) as streams:
            killed_s = time.monotonic()
            engine.process.kill()
            await streams.over()
        assert {stream.end for stream in streams.zmq} <= {"draining", "PeerDied"}
        assert {stream.end for stream in streams.http} <= {"draining", "engine_gone", "RemoteProtocolError"}
        assert max(stream.ended_s for stream in (*streams.zmq, *streams.http)) - killed_s < END_S

    with running("--slots", "64", "--http-port", "0") as engine:
        children = engine.children()
        ports = [port_of(address) for address in (engine.endpoint, engine.url)]
        engine.over(session)
        assert engine.wait() == -signal.SIGKILL
        assert gone(children, 10.0)
        assert not segments_of(children)
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def test_what_an_engine_left_that_was_killed_as_a_whole_is_reclaimed_by_the_next_start() -> None:
    """Also by one that is refused, and before memory is counted: by then it has to be free. Its ports are free too."""
    with running("--slots", "64", "--http-port", "0") as engine:
        children = engine.children()
        ports = [str(port_of(address)) for address in (engine.endpoint, engine.url)]
        for process in [psutil.Process(engine.process.pid), *children]:
            process.kill()
        engine.wait()
        assert gone(children, 10.0)
    left = segments_of(children)
    assert left and {name for _, name in ledger.stale()} >= {name.split("@")[0] for name in left}
    assert all(Path("/dev/shm", name.split("@")[0]).exists() for name in left) or sys.platform != "linux"
    refused = launch("--slots", "4", "--port", ports[0], "--http-port", ports[1])
    assert refused.returncode == 2 and "--slots 4" in refused.stderr
    assert not segments_of(children) and not ledger.stale()
    assert not any(Path("/dev/shm", name.split("@")[0]).exists() for name in left)


def test_a_second_engine_on_one_of_its_ports_is_refused_and_disturbs_nobody(engine: Engine) -> None:
    """At once, by the number of the port; answers of the first, which are under way, are what they were before."""

    async def session(client: Client) -> None:
        expected = await answers(engine, client, 2, 2, 40)
        zmq, http = port_of(engine.endpoint), port_of(engine.url)
        for flags, port in ((("--port", str(zmq)), zmq), (("--http-port", str(http)), http)):
            async with under_way(engine, client, 2, 2, 40) as streams:
                start_s = time.monotonic()
                second = await asyncio.to_thread(launch, *flags)
                assert time.monotonic() - start_s < SECOND_START_S * ROOM
                await streams.over()
            assert second.returncode == 2 and second.stderr.count("error: ") == 1 and "Traceback" not in second.stderr
            assert f":{port}" in second.stderr and flags[0] in second.stderr
            assert [stream.answer for stream in (*streams.zmq, *streams.http)] == expected

    children = engine.children()
    engine.over(session)
    assert engine.children() == children


def test_prompt_answers_once_and_of_two_starts_at_one_moment_one_is_refused() -> None:
    """Before it has started anything, while the port of both is still free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    took_s = []

    def start() -> "subprocess.CompletedProcess[str]":
        start_s = time.monotonic()
        done = launch("--port", port, *QUESTION)
        took_s.append(time.monotonic() - start_s)
        return done

    with ThreadPoolExecutor(2) as both:
        refused, done = sorted(both.map(lambda _: start(), range(2)), key=lambda done: -done.returncode)
    assert done.returncode == 0, done.stderr
    assert "Ready in" in done.stderr and "Ready in" not in done.stdout
    assert "new tokens" in done.stdout.splitlines()[-1]
    assert refused.returncode == 2 and f":{port}" in refused.stderr and "--port" in refused.stderr
    assert refused.stderr.count("error: ") == 1 and "event=start " not in refused.stderr
    assert min(took_s) < SECOND_START_S * ROOM


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
        done = launch("--port", port)
    assert done.returncode == 2
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
