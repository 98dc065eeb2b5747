"""Processes of a running engine are killed; seen by its clients, and against what the engine answered before."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from copyengine.device import ledger
from copyengine.wire.deaths import MOST_DEATHS
from copyengine.wire.errors import PeerDied, RequestRefused, SlotstreamError
from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.e2e.engine import ROOT, Engine, gone, launch_command, running
from tests.e2e.test_lifecycle import segments_of
from tests.log_lines import events

FLAGS = ("--slots", "64", "--chunked-prefill-size", "256")
NAMES = ("copyengine", "worker0", "scheduler")
PROMPT = list(range(300, 330))
ENDLESS = 4000
"""Tokens of an answer that takes far longer than a test."""

END_S = 2.0
"""Seconds within which a client hears of the end of its request after a process died."""


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


async def error_of(task: "asyncio.Task[list[int]]") -> SlotstreamError:
    """How the answer ends, within END_S from now."""
    start = time.monotonic()
    with pytest.raises(SlotstreamError) as ended:
        await asyncio.wait_for(task, 30)
    assert time.monotonic() - start < END_S
    return ended.value


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


def test_one_worker_and_each_process_killed_in_the_middle_of_an_answer() -> None:
    """The answer ends with an error; the next one, after the restart, is what it was before. At last, SIGTERM finds
    the worker dead."""
    with running(*FLAGS) as engine:

        async def session(client: Client) -> None:
            before = await answer(client, 12)
            for times, victim in enumerate(NAMES, 1):
                task, _ = await begun(client, ENDLESS)
                ran = {name: engine.child(name) for name in NAMES}
                ran[victim].kill()
                error = await error_of(task)
                if victim == "scheduler":
                    assert isinstance(error, PeerDied)
                else:
                    assert isinstance(error, RequestRefused) and error.code == "worker_failed"
                    await refused_meanwhile(client)
                await asyncio.to_thread(engine.wait_serving_again, times)
                assert await answer(client, 12) == before
                kept = [name for name in NAMES if engine.child(name) == ran[name]]
                assert kept == {"copyengine": ["scheduler"]}.get(victim, [name for name in NAMES if name != victim])

        engine.over(session)
        assert [line.split(";")[0] for line in deaths(engine)] == [f"{name} was killed by SIGKILL" for name in NAMES]
        with nothing_left_of(engine):
            engine.child("worker0").kill()
            engine.wait_for(lambda: len(deaths(engine)) == 4)
            assert engine.stop(signal.SIGTERM) == 0
        assert "Traceback" not in engine.text()


async def refused_meanwhile(client: Client) -> None:
    health = await client.health()
    assert (health.ready, health.phase) == (False, "restarting")
    with pytest.raises(RequestRefused, match="worker0 restarting") as refused:
        await answer(client, 1)
    assert refused.value.code == "not_ready"


def segments(engine: Engine) -> dict[str, int]:
    """How many each process owns."""
    return {name: len(segments_of([engine.child(name)])) for name in ("copyengine", "worker0", "worker1")}


def test_two_workers_share_the_banks_and_do_not_share_a_death() -> None:
    """Nor does a scheduler that is just started wait for dead workers. And five deaths in a row are given up."""
    with running(*FLAGS, "--workers", "2") as engine:
        assert segments(engine) == SHARED

        async def session(client: Client) -> None:
            before = await answer(client, 40)
            both = [await begun(client, 40), await begun(client, 40)]
            engine.child("worker1").kill()
            ends = await asyncio.gather(*(task for task, _ in both), return_exceptions=True)
            died = next(end for end in ends if isinstance(end, BaseException))
            assert isinstance(died, RequestRefused) and died.code == "worker_failed"
            assert [end for end in ends if end is not died] == [before]
            assert await answer(client, 40) == before, "by the other worker, at once or after the restart"
            assert (await client.health()).ready
            await asyncio.to_thread(engine.wait_serving_again, 1)
            engine.child("scheduler").kill()
            await asyncio.to_thread(engine.wait_for, lambda: len(deaths(engine)) == 2)
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
        assert "Traceback" not in engine.text()


SHARED = {"copyengine": 8, "worker0": 3, "worker1": 3}
"""One bank for each layer; pool, flags and ring for each worker."""


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
