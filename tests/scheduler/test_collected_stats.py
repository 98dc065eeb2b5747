"""The file of --collect-stats: sums against a count by hand, and what becomes of it when something is in the way."""

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyengine.wire.errors import ConfigError, PeerDied
from copyengine.wire.loop import run
from scheduler.client import Client
from scheduler.collected_stats import Collector, collecting, figures, replace_file
from scheduler.config import ServingConfig
from scheduler.preflight import check_stats_file
from scheduler.protocol import Sampling
from tests.scheduler.rig import LAYER_STATS, on_loop
from tests.scheduler.test_main import scheduler, until_ready
from worker.client import WorkerClient
from worker.protocol import LOGGED_STEPS, LayerStatsReply, LayerTraffic, OracleFigures

LAYERS, EXPERTS = 2, 3


def row(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 9), min_size=length, max_size=length)


TRAFFIC = st.builds(LayerTraffic, row(LAYERS), row(LAYERS))
ROUTING = st.lists(row(EXPERTS), min_size=LAYERS, max_size=LAYERS)
ORACLE = st.builds(OracleFigures, *[st.integers(0, 9)] * 4)


@given(st.lists(st.builds(LayerStatsReply, TRAFFIC, TRAFFIC, TRAFFIC, ROUTING, ORACLE), max_size=3))
def test_figures_are_the_sums_over_all_workers(replies: list[LayerStatsReply]) -> None:
    """One number after the other."""
    found = figures("m", replies)
    assert (found.layers, found.experts) == ((LAYERS, EXPERTS) if replies else (0, 0))
    oracle = found.oracle
    assert oracle is not None and oracle.window_steps == LOGGED_STEPS
    for name in ("steps", "lookups", "hits", "oracle_hits"):
        assert getattr(oracle, name) == sum(getattr(reply.oracle, name) for reply in replies)
    for hits, rate in ((oracle.hits, oracle.hit_rate), (oracle.oracle_hits, oracle.oracle_hit_rate)):
        assert rate is None if oracle.lookups == 0 else rate is not None and abs(rate - hits / oracle.lookups) < 1e-4
    for layer in range(found.layers):
        for expert in range(EXPERTS):
            assert found.decode_routing[layer][expert] == sum(reply.routing[layer][expert] for reply in replies)
        for mode in ("decode", "demand", "streamed"):
            hits = sum(getattr(reply, mode).hits[layer] for reply in replies)
            misses = sum(getattr(reply, mode).misses[layer] for reply in replies)
            told = getattr(found, mode)
            assert (told.hits[layer], told.misses[layer]) == (hits, misses)
            rate = told.hit_rate[layer]
            assert rate is None if hits + misses == 0 else abs(rate - hits / (hits + misses)) < 1e-4


class Worker:
    """Answers until it dies."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.dead = False

    async def layer_stats(self, deadline_s: float) -> LayerStatsReply:
        if self.dead:
            raise PeerDied("the worker is gone")
        return LayerStatsReply(LayerTraffic([self.count], [0]), LayerTraffic([0], [0]), LayerTraffic([0], [0]), [[1]])


def clients(*workers: Worker) -> list[WorkerClient]:
    return cast(list[WorkerClient], list(workers))


def hits(path: Path) -> list[int]:
    return cast(list[int], json.loads(path.read_text("utf-8"))["decode"]["hits"])


def test_a_worker_that_died_counts_with_its_last_answer_and_its_successor_from_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        one, other, successor = Worker(3), Worker(5), Worker(1)
        living = clients(one, other)
        collector = Collector(tmp_path / "stats.json", "m", lambda: living)
        await collector.write(1.0)
        assert hits(tmp_path / "stats.json") == [8]
        other.dead, other.count = True, 50
        await collector.write(1.0)
        assert hits(tmp_path / "stats.json") == [8]
        living[:] = clients(one, successor)
        one.count = 4
        await collector.write(1.0)
        assert hits(tmp_path / "stats.json") == [4 + 5 + 1]

    run(main(), "selector")
    assert [path.name for path in tmp_path.iterdir()] == ["stats.json"]


def test_of_workers_that_came_and_went_only_the_sum_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        living: list[WorkerClient] = []
        collector = Collector(tmp_path / "stats.json", "m", lambda: living)
        for count in range(1, 6):
            living[:] = clients(Worker(count), Worker(10 * count))
            await collector.write(1.0)
            assert hits(tmp_path / "stats.json") == [11 * sum(range(1, count + 1))]
            assert list(collector._told) == living and len(collector._past) == (count > 1)

    run(main(), "selector")


class Failing(Worker):
    """Counts its answers, none of which is one."""

    async def layer_stats(self, deadline_s: float) -> LayerStatsReply:
        self.count += 1
        raise ValueError("a bug")


def test_what_goes_wrong_ends_neither_the_writing_nor_the_engines_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scheduler.collected_stats.EVERY_S", 0.001)

    async def main() -> None:
        failing = Failing(0)
        async with collecting(str(tmp_path / "stats.json"), "m", lambda: clients(failing)):
            async with asyncio.timeout(20):
                while failing.count < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            before = failing.count
        assert failing.count == before + 1

    run(main(), "selector")
    assert caplog.text.count("event=stats_failed") >= 3 and not list(tmp_path.iterdir())


class Slow(Worker):
    """Notes what becomes of its answers, the first of which does not come; giving that up takes a while."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seen: list[str] = []

    async def layer_stats(self, deadline_s: float) -> LayerStatsReply:
        self.seen.append("asked")
        if len(self.seen) == 1:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                self.seen.append("given up")
        return await super().layer_stats(deadline_s)


def test_the_last_writing_begins_once_the_one_before_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.collected_stats.EVERY_S", 0.001)

    async def main() -> None:
        slow = Slow()
        async with collecting(str(tmp_path / "stats.json"), "m", lambda: clients(slow)):
            async with asyncio.timeout(20):
                while not slow.seen:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        assert slow.seen == ["asked", "given up", "asked"]

    run(main(), "selector")
    assert hits(tmp_path / "stats.json") == [1]


def test_a_disk_that_takes_nothing_is_an_error_line_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "stats.json"
    replace_file(path, b"before")
    written = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        written(self, content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with caplog.at_level(logging.ERROR):
        run(Collector(path, "m", lambda: clients(Worker(1))).write(1.0), "selector")
    assert [str(path) in r.getMessage() and "No space left" in r.getMessage() for r in caplog.records] == [True]
    assert path.read_bytes() == b"before\n" and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_refused_before_the_start(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(os.devnull)
    long = tmp_path / ("n" * 252)  # itself no longer than a name may be, but no room for a side file's
    longer = tmp_path / ("n" * 300)
    for file in (tmp_path, tmp_path / "none" / "stats.json", Path(sys.executable) / "stats.json", link, long, longer):
        with pytest.raises(ConfigError, match="--collect-stats"):
            check_stats_file(ServingConfig(collect_stats=str(file)))
    check_stats_file(ServingConfig(collect_stats=str(tmp_path / "stats.json")))
    check_stats_file(ServingConfig())
    assert list(tmp_path.iterdir()) == [link]


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    """Against a pipe that has come into its place since the start."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no file"):
        replace_file(pipe, b"{}")
    assert list(tmp_path.iterdir()) == [pipe] and pipe.is_fifo()


@pytest.mark.parametrize("way", ["drain", "eof", "SIGTERM"])
def test_it_is_written_however_the_process_is_told_to_end(model: Path, tmp_path: Path, way: str) -> None:
    if way == "SIGTERM" and sys.platform == "win32":
        pytest.skip("Windows has no such signals to send")
    path = tmp_path / "stats.json"

    async def main() -> None:
        async with scheduler(model, "--parent-pipe", "--collect-stats", str(path)) as (process, _):
            endpoint, _ = await until_ready(process)
            async with Client(endpoint) as client:
                async for _ in client.generate(token_ids=[5], sampling=Sampling(max_tokens=2)):
                    pass
            if way == "SIGTERM":
                process.popen.send_signal(signal.SIGTERM)
            else:
                await process.tell(b"drain\n" if way == "drain" else None)
            assert await process.code() == 0
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        assert found["decode"]["hits"] == LAYER_STATS.decode.hits and found["model"] == model.name
        assert found["decode_routing"] == LAYER_STATS.routing

    on_loop("selector", main)


def test_a_refused_file_ends_the_start(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with scheduler(model, "--collect-stats", str(tmp_path)) as (process, _):
            assert "--collect-stats" in str(await asyncio.wait_for(process.event(), 20))
            assert await process.code() == 2

    on_loop("selector", main)
