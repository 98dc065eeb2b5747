"""The live line, word for word; and on a made-up terminal beside a scheduler that answers, goes and comes again."""

import asyncio
import io
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from copyengine.wire.logs import ERASE_LINE
from scheduler import live_status
from scheduler.live_status import LiveStatus, status_line
from scheduler.protocol import ModeCounters, Sampling, StatsReply, WorkerCounters
from tests.scheduler.rig import engine, on_loop


def stats(**values: Any) -> StatsReply:
    names = [name for name in StatsReply.__struct_fields__ if name not in ("decode", "demand", "streamed", "workers")]
    none: dict[str, Any] = dict.fromkeys(names, 0) | dict.fromkeys(("decode", "demand", "streamed"), ModeCounters())
    return StatsReply(**none | {"workers": []} | values)


BEFORE = stats(generated_tokens=100, finished=3, decode=ModeCounters(10, 1000, 900, 100, 5 * 10**9))
NOW = stats(
    waiting=2,
    running=16,
    finished=5,
    failed=1,
    generated_tokens=500,
    decode=ModeCounters(20, 3000, 2800, 200, 6 * 10**9),
    demand=ModeCounters(1, 10, 0, 10, 10**9),
)


def test_rates_are_those_of_the_time_between_two_looks() -> None:
    assert status_line(BEFORE, NOW, 2.0) == (
        "2 waiting, 16 running, 5 finished, 1 failed | 200.0 tokens/s | decode hits 95.0 % | link 1.00 GB/s"
    )


def test_without_traffic_there_is_no_hit_rate() -> None:
    assert status_line(NOW, NOW, 1.0).endswith("| 0.0 tokens/s | decode hits - | link 0.00 GB/s")
    assert status_line(stats(), stats(), 1.0).startswith("0 running | ")


def test_counters_that_began_anew_make_no_rate_negative() -> None:
    assert status_line(NOW, stats(), 1.0) == "0 running | 0.0 tokens/s | decode hits - | link 0.00 GB/s"


def test_a_worker_that_is_down_is_named() -> None:
    counters = [*[0] * 7, ModeCounters(), ModeCounters(), ModeCounters()]
    workers = [WorkerCounters("worker0", True, *counters), WorkerCounters("worker1", False, *counters)]  # type: ignore[arg-type]
    assert status_line(stats(), stats(workers=workers), 1.0).startswith("worker1 down | 0 running")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    async def shows(self, text: str) -> None:
        """Wait until `text` has been written since the last time."""
        async with asyncio.timeout(10):
            while text not in self.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.truncate(0)


def test_what_is_no_terminal_gets_nothing() -> None:
    out = io.StringIO()
    threads = threading.active_count()
    with LiveStatus("tcp://127.0.0.1:1", out):
        assert threading.active_count() == threads
    assert out.getvalue() == ""


def test_it_follows_a_scheduler_that_is_started_anew(
    model: Path, monkeypatch: pytest.MonkeyPatch, event_loop: Any
) -> None:
    monkeypatch.setattr(live_status, "BUSY_S", 0.02)
    monkeypatch.setattr(live_status, "QUIET_S", 0.02)
    monkeypatch.setattr("scheduler.client.ANSWER_S", 0.3)
    out = Terminal()

    async def main() -> None:
        async with engine(model) as rig:
            status = LiveStatus(rig.endpoint, out, event_loop).__enter__()
            try:
                await out.shows(f"{ERASE_LINE}0 running")
                async with rig.client() as client:
                    async for _ in client.generate(token_ids=[5], sampling=Sampling(max_tokens=2)):
                        pass
                await out.shows("1 finished")
                await rig.server.close()
                await out.shows("the scheduler does not answer")
                async with engine(model, at=rig.endpoint):
                    await out.shows(f"{ERASE_LINE}0 running")
            finally:
                await asyncio.to_thread(status.__exit__, None, None, None)  # it waits for the thread
        written = out.getvalue()
        assert written.endswith(f"{ERASE_LINE}\r")
        await asyncio.sleep(0.1)
        assert out.getvalue() == written

    on_loop(event_loop, main)


def test_a_scheduler_that_is_gone_because_the_engine_ends_is_not_missed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is empty from then on."""
    monkeypatch.setattr(live_status, "BUSY_S", 0.02)
    monkeypatch.setattr(live_status, "QUIET_S", 0.02)
    monkeypatch.setattr("scheduler.client.ANSWER_S", 0.3)
    out, ending = Terminal(), threading.Event()

    async def main() -> None:
        async with engine(model) as rig:
            status = LiveStatus(rig.endpoint, out, "selector", ending.is_set).__enter__()
            await out.shows("0 running")
            ending.set()
            await rig.server.close()
            await out.shows(f"{ERASE_LINE}\r{ERASE_LINE}\r")
            await asyncio.to_thread(status.__exit__, None, None, None)
        assert "does not answer" not in out.getvalue()

    on_loop("selector", main)


def test_a_long_line_does_not_wrap(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be erased if it did."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(live_status, "END_S", 10.0)
    monkeypatch.setattr(live_status, "BUSY_S", 30.0)
    out = Terminal()

    async def main() -> None:
        async with engine(model) as rig:
            status = LiveStatus(rig.endpoint, out).__enter__()
            while not out.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            start_s = time.monotonic()
            await asyncio.to_thread(status.__exit__, None, None, None)
            assert time.monotonic() - start_s < live_status.END_S, "it does not wait for its next look"
        lines = out.getvalue().replace(ERASE_LINE, "").split("\r")
        assert max(map(len, lines)) == 19

    on_loop("selector", main)


def test_a_thread_that_is_stuck_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a signal would find nobody who ends the engine's processes."""
    release = threading.Event()
    monkeypatch.setattr(LiveStatus, "_run", lambda _: release.wait(10))
    with LiveStatus("tcp://127.0.0.1:1", Terminal()):
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 5
    release.set()
