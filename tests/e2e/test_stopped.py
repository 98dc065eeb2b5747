"""Processes of a running engine are stopped (SIGSTOP), for a while or for good; against what it answered before."""

import asyncio
import signal
import socket
import sys
import time
from typing import Any

import psutil
import pytest

from copyengine.wire.watchdog import ASK_S
from scheduler.client import Client
from tests.e2e.engine import Engine, gone, running
from tests.e2e.streams import END_S, Streams, answers, under_way, until_health
from tests.e2e.test_lifecycle import segments_of
from tests.e2e.test_restarts import deaths
from tests.e2e.windows import CONDITIONS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows stops no processes")

FLAGS = ("--slots", "64", "--chunked-prefill-size", "256", "--http-port", "0")
NAMES = ("worker0", "copyengine", "scheduler", "http", "launch.py")
WHOLE = 24
"""Tokens of an answer that is under way while something is stopped."""

WATCHDOG_S = 3.0
"""Of a run in which somebody is stopped for good."""

TURN_S = 2.0
"""Seconds beyond the watchdog's for two turns of launch.py and the end of the killed, on a loaded machine."""


def process(engine: Engine, name: str) -> psutil.Process:
    return psutil.Process(engine.process.pid) if name == "launch.py" else engine.child(name)


def conditions(event_loop: str) -> dict[str, Any]:
    """What `running` is to be given."""
    return {"env": CONDITIONS if event_loop == "selector" else {}}


async def stopped_meanwhile(engine: Engine, client: Client, name: str, seconds: float) -> list[list[Any]]:
    """The whole answers during which `name` was stopped for so long."""
    async with under_way(engine, client, 2, 2, WHOLE) as streams:
        stopped = process(engine, name)
        stopped.suspend()
        try:
            await asyncio.sleep(seconds)
        finally:
            stopped.resume()
        await streams.over()
    ended = [*streams.zmq, *streams.http]
    assert all(stream.end == "length" for stream in ended), [(name, stream.end, stream.why) for stream in ended]
    return [stream.answer for stream in ended]


@pytest.mark.parametrize(
    ("event_loop", "seconds"),
    [
        pytest.param("auto", 10.0, marks=pytest.mark.slow),
        pytest.param("selector", 10.0, marks=pytest.mark.slow),
    ],
)
def test_who_is_stopped_for_a_while_goes_on(event_loop: str, seconds: float) -> None:
    """Each process alone, and then all together: answers under way come to their end and are what they should be, and
    nothing is started anew. 10 s are half of the watchdog's time."""
    with running(*FLAGS, "--event-loop", event_loop, **conditions(event_loop)) as engine:
        children = engine.children()

        async def session(client: Client) -> None:
            expected = await answers(engine, client, 2, 2, WHOLE)
            for name in NAMES:
                assert await stopped_meanwhile(engine, client, name, seconds) == expected, name
            async with under_way(engine, client, 2, 2, WHOLE) as streams:
                everybody = [process(engine, name) for name in NAMES]
                for each in everybody:
                    each.suspend()
                await asyncio.sleep(seconds)
                for each in reversed(everybody):
                    each.resume()
                await streams.over()
            assert [stream.answer for stream in (*streams.zmq, *streams.http)] == expected

        engine.over(session)
        assert engine.children() == children and not deaths(engine)
        assert engine.stop(signal.SIGTERM) == 0


@pytest.mark.slow  # a minute of waiting; tests/copyengine/wire/test_supervisor.py has the same of lighter processes
@pytest.mark.parametrize("event_loop", ["selector", "auto"])
def test_who_is_stopped_for_good_is_dead_after_the_watchdogs_time(event_loop: str) -> None:
    """Answers that need it end with an error then, and the next ones are right. launch.py has nobody who watches it:
    answers go on without it, and a kill of it while it is stopped leaves nothing."""
    flags = ("--event-loop", event_loop, "--watchdog-s", f"{WATCHDOG_S:g}")
    with running(*FLAGS, *flags, **conditions(event_loop)) as engine:

        async def session(client: Client) -> None:
            expected = await answers(engine, client, 2, 2, WHOLE)
            for times, name in enumerate(NAMES[:-1], 1):
                async with under_way(engine, client, 2, 2) as streams:
                    stopped = process(engine, name)
                    stopped.suspend()
                    await dead_in_time(engine, stopped, streams, name)
                await asyncio.to_thread(engine.wait_serving_again, times)
                await until_health(engine, client, ready=True)
                assert await answers(engine, client, 2, 2, WHOLE) == expected
            engine.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(WATCHDOG_S + ASK_S + TURN_S)
            assert await answers(engine, client, 2, 2, WHOLE) == expected

        engine.over(session)
        said = [line.split(";")[0] for line in deaths(engine)]
        assert said == [f"{name} was killed by SIGKILL: {SILENT}" for name in NAMES[:-1]]
        children, ports = engine.children(), [int(at.rsplit(":", 1)[1]) for at in (engine.endpoint, engine.url)]
        engine.process.kill()
        assert gone(children, 10.0) and not segments_of(children)
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))


SILENT = f"it has answered nothing for {WATCHDOG_S:g} s (--watchdog-s)"


async def dead_in_time(engine: Engine, stopped: psutil.Process, streams: Streams, name: str) -> None:
    """Killed after the watchdog's time, and within a question's distance and some turns more; all whose answers need it
    hear of that in time."""
    start_s = time.monotonic()
    died = asyncio.to_thread(stopped.wait, 30)
    await died
    late_s = time.monotonic() - start_s - WATCHDOG_S
    assert -1.0 < late_s < ASK_S + TURN_S, (name, late_s)
    if name == "http":
        return
    async with asyncio.timeout(2 * END_S):
        await streams.over()
    assert all(stream.end not in ("", "length") for stream in (*streams.zmq, *streams.http))
