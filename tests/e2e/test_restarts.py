"""Processes of a running engine are killed; seen by its clients, and against what the engine answered before."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq.asyncio

from copyengine.device import ledger
from copyengine.wire.deaths import MOST_DEATHS
from copyengine.wire.errors import RequestRefused
from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.e2e.engine import ROOT, Engine, gone, launch_command, running
from tests.e2e.streams import END_S, LOOK_S, Streams, answers, under_way, until_health
from tests.e2e.test_lifecycle import segments_of
from tests.log_lines import events
from worker.client import WorkerClient

FLAGS = ("--slots", "64", "--chunked-prefill-size", "256")
NAMES = ("copyengine", "worker0", "scheduler", "http")
VICTIMS = {
    "worker0": ("worker_failed", "worker_failed"),
    "copyengine": ("worker_failed", "worker_failed"),
    "scheduler": ("PeerDied", "engine_gone"),
    "http": ("", ""),
}
"""Who is killed, and how answers end then by ZMQ and by HTTP."""
PROMPT = list(range(300, 330))

NOT_READY_S = 1.0
"""Seconds within which health says that the engine is not ready."""

READY_S = 5.0
"""Seconds beyond the time of a load within which it is ready again."""

ROOM = 2.0
"""What these times are multiplied by: others may load the machine, and more than they did at the start."""


def answer(client: Client, max_tokens: int, prompt: list[int] = PROMPT) -> Awaitable[list[int]]:
    async def ask() -> list[int]:
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        return [t async for piece in client.generate(token_ids=prompt, sampling=sampling) for t in piece.token_ids]

    return ask()


async def begun(client: Client, max_tokens: int) -> tuple["asyncio.Task[list[int]]", "asyncio.Queue[int]"]:
    """An answer of which the first token is there, and the later tokens as they come."""
    tokens: asyncio.Queue[int] = asyncio.Queue()

    async def ask() -> list[int]:
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        ids = []
        async for piece in client.generate(token_ids=PROMPT, sampling=sampling):
            for token in piece.token_ids:
                ids.append(token)
                tokens.put_nowait(token)
        return ids

    task = asyncio.create_task(ask())
    await asyncio.wait_for(tokens.get(), 20)
    return task, tokens


@contextmanager
def nothing_left_of(engine: Engine) -> Iterator[None]:
    """Whatever runs now, ran before or is started inside has ended afterwards, and its memory and port are free."""
    children = engine.children()
    port = int(engine.endpoint.rsplit(":", 1)[1])
    yield
    assert gone(children, 2.0) and not segments_of(children)
    assert not ledger.stale()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_one_worker_and_each_process_killed_under_load() -> None:
    """With eight answers by ZMQ and eight by HTTP, for all of which experts are copied all the time: each that depended
    on the dead ends with an error, the others go on. Who asks hears that the engine is not ready, and soon that it is;
    the next answers are what they were before, and the experts in slots what was loaded. At last, SIGTERM finds the
    worker dead."""
    start_s = time.monotonic()
    with running(*FLAGS, "--http-port", "0", "--verify-copies") as engine:
        load_s = time.monotonic() - start_s

        async def session(client: Client) -> None:
            before = await answers(engine, client, 8, 8, 12)
            owned = segments(engine)
            for times, victim in enumerate(VICTIMS, 1):
                async with under_way(engine, client) as streams:
                    ran = {name: engine.child(name) for name in NAMES}
                    await experts_are_copied(client)
                    killed_s = time.monotonic()
                    ran[victim].kill()
                    if victim == "http":
                        await the_front_is_gone(streams, killed_s)
                    elif victim == "scheduler":
                        await all_end(streams, VICTIMS[victim], killed_s)
                    else:
                        ending = all_end(streams, VICTIMS[victim], killed_s)
                        await asyncio.gather(ending, health_says_so(engine, client, killed_s))
                        await refused_meanwhile(client)
                await until_health(engine, client, ready=True)
                again_s = time.monotonic() - killed_s
                print(f"{victim}: ready again after {again_s:.2f} s, started in {load_s:.2f} s")
                assert again_s < ROOM * load_s + READY_S + pause_s(times), (victim, again_s, load_s)
                await asyncio.to_thread(engine.wait_serving_again, times)
                assert await answers(engine, client, 8, 8, 12) == before
                kept = [name for name in NAMES if engine.child(name) == ran[name]]
                fallen = {"copyengine": ["copyengine", "worker0"]}.get(victim, [victim])
                assert kept == [name for name in NAMES if name not in fallen]
                assert segments(engine) == owned
                assert await damaged_slots(engine) == []

        engine.over(session)
        assert [line.split(";")[0] for line in deaths(engine)] == [f"{name} was killed by SIGKILL" for name in VICTIMS]
        with nothing_left_of(engine):
            engine.child("worker0").kill()
            engine.wait_for(lambda: len(deaths(engine)) == len(VICTIMS) + 1)
            assert engine.stop(signal.SIGTERM) == 0
        assert "Traceback" not in engine.text()


async def damaged_slots(engine: Engine) -> list[tuple[int, int]]:
    """Of the experts in the worker's slots those that are not what was loaded."""
    (port,) = [one.laddr.port for one in engine.child("worker0").net_connections("tcp") if not one.raddr]
    context = zmq.asyncio.Context()
    worker = WorkerClient(context, f"tcp://127.0.0.1:{port}")
    try:
        summed = await worker.verify_slots(20)
    finally:
        await worker.close()
        context.term()
    assert summed.checked
    return summed.damaged


async def experts_are_copied(client: Client) -> None:
    """Returns in the middle of one of the steps that copy some."""
    before = (await client.stats()).decode.copied_nbytes
    async with asyncio.timeout(30):
        while (await client.stats()).decode.copied_nbytes == before:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


async def all_end(streams: Streams, ends: tuple[str, str], killed_s: float) -> None:
    """By ZMQ and by HTTP with these errors, each within END_S."""
    await streams.over()
    assert {stream.end for stream in streams.zmq} == {ends[0]}
    assert {stream.end for stream in streams.http} == {ends[1]}
    late_s = max(stream.ended_s for stream in (*streams.zmq, *streams.http)) - killed_s
    print(f"the last of {len(streams.zmq) + len(streams.http)} answers ended after {late_s:.2f} s")
    assert late_s < END_S


async def health_says_so(engine: Engine, client: Client, killed_s: float) -> None:
    """That it is not ready, by ZMQ and by HTTP, in time."""
    await until_health(engine, client, ready=False)
    late_s = time.monotonic() - killed_s
    print(f"not ready after {late_s:.2f} s")
    assert late_s < ROOM * NOT_READY_S


async def the_front_is_gone(streams: Streams, killed_s: float) -> None:
    """HTTP's connections break; ZMQ's clients notice nothing."""
    async with asyncio.timeout(30):
        while not all(stream.end for stream in streams.http):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
    assert {stream.end for stream in streams.http} == {"RemoteProtocolError"}
    assert max(stream.ended_s for stream in streams.http) - killed_s < END_S
    had = [len(stream.pieces) for stream in streams.zmq]
    async with asyncio.timeout(30):
        while any(len(stream.pieces) <= old for stream, old in zip(streams.zmq, had, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
    assert not any(stream.end for stream in streams.zmq)


def pause_s(death: int) -> float:
    """Before what died is started anew: deaths.py's, with room for a front whose deaths are counted apart."""
    return 2.0 ** (death - 2) if death > 1 else 0.0


async def refused_meanwhile(client: Client) -> None:
    health = await client.health()
    assert (health.ready, health.phase) == (False, "restarting")
    with pytest.raises(RequestRefused, match="worker0 restarting") as refused:
        await answer(client, 1)
    assert refused.value.code == "not_ready"


def segments(engine: Engine) -> dict[str, int]:
    """How many each process owns that owns any."""
    names = [name for name in ("copyengine", "worker0", "worker1") if name != "worker1" or engine.workers > 1]
    return {name: len(segments_of([engine.child(name)])) for name in names}


def test_two_workers_share_the_banks_and_do_not_share_a_death() -> None:
    """Nor does a scheduler that is just started wait for dead workers. And five deaths in a row are given up, after
    pauses before each further start; there are no files then that were not there before."""
    cache = Path(os.environ["XDG_CACHE_HOME"])
    files = sorted(cache.rglob("*"))
    with running(*FLAGS, "--workers", "2") as engine:
        assert segments(engine) == SHARED

        async def session(client: Client) -> None:
            before = await answer(client, 40)
            expected = await answers(engine, client, 8, 0, 60)
            async with under_way(engine, client, 8, 0, 60) as streams:
                killed_s = time.monotonic()
                engine.child("worker1").kill()
                await streams.over()
            died = [stream for stream in streams.zmq if stream.end != "length"]
            assert 0 < len(died) < 8 and {stream.end for stream in died} == {"worker_failed"}
            assert max(stream.ended_s for stream in died) - killed_s < END_S
            lived = [stream.number for stream in streams.zmq if stream.end == "length"]
            assert [streams.zmq[i].answer for i in lived] == [expected[i] for i in lived]
            assert await answer(client, 40) == before, "by the other worker, at once or after the restart"
            assert (await client.health()).ready
            await asyncio.to_thread(engine.wait_serving_again, 1)
            scheduler = engine.child("scheduler")
            scheduler.kill()
            await asyncio.to_thread(engine.wait_for, lambda: has_another(engine, "scheduler", scheduler))
            engine.child("copyengine").kill()  # the new scheduler was given the workers that end with it
            await asyncio.to_thread(engine.wait_serving_again, 2)
            assert len(deaths(engine)) == 3 and "copyengine, worker0, worker1, scheduler anew" in deaths(engine)[2]
            assert [*await asyncio.gather(answer(client, 40), answer(client, 40))] == [before, before]

        engine.over(session)
        assert segments(engine) == SHARED
        with nothing_left_of(engine):
            engine.child("scheduler").kill()
            engine.wait_for(lambda: len(deaths(engine)) == MOST_DEATHS - 1)
            engine.child("copyengine").kill()
            assert engine.wait() == 1
        assert engine.errors[-1] == (
            f"error: given up after {MOST_DEATHS} deaths in a row; the first: worker1 was killed by SIGKILL"
        )
        paused = ["after a pause of 1 s)", "after a pause of 2 s)", "after a pause of 4 s)"]
        assert [line.split("; ")[-1] for line in deaths(engine)[1:]] == paused
        assert "Traceback" not in engine.text()
    assert sorted(cache.rglob("*")) == files


SHARED = {"copyengine": 8, "worker0": 3, "worker1": 3}
"""One bank for each layer; pool, flags and ring for each worker."""


def has_another(engine: Engine, name: str, old: psutil.Process) -> bool:
    """Whether a process of that name runs that is not `old`."""
    try:
        return bool(engine.child(name) != old)
    except AssertionError:
        return False


def deaths(engine: Engine) -> list[str]:
    """What the log says of each."""
    said = [line.fields.get("detail", "") for line in events(engine.errors) if line.process == "launch"]
    return [text for text in said if " anew (death " in text]


def test_a_signal_during_the_start_leaves_nothing() -> None:
    argv = launch_command("--slots", "64")
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("experts:"))
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert "Traceback" not in process.stderr.read()
    assert gone(children, 2.0) and not segments_of(children)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no such signals")
def test_an_interrupt_during_the_imports_shows_no_traceback() -> None:
    """The interpreter says when it is in the middle of them."""
    argv = [sys.executable, "-X", "importtime", *launch_command("--slots", "64")[1:]]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "msgspec" in line)
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
        assert process.wait(15) in (0, -signal.SIGINT)
