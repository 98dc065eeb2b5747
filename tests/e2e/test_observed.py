"""What an engine tells of itself, from outside: the file of --collect-stats, the log, the counters of each worker.

Against what its client was told of each answer.
"""

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

from scheduler.client import Client
from scheduler.protocol import Finished, Sampling, StatsReply
from tests.e2e.engine import running

K, LAYERS, EXPERTS = 8, 8, 64
"""Of the built-in model."""


async def ask(endpoint: str) -> tuple[list[Finished], StatsReply]:
    """Three answers, and the counters after them."""
    async with Client(endpoint) as client:
        ends = []
        for number in range(3):
            answer = client.generate(
                token_ids=[5 + number, 9, 30], sampling=Sampling(max_tokens=4, ignore_eos=True), request_id=f"r{number}"
            )
            async for _ in answer:
                pass
            assert answer.finished
            ends.append(answer.finished)
        return ends, await client.stats()


def test_file_log_and_counters_tell_what_clients_were_told(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    with running("--collect-stats", str(path)) as engine:
        ends, stats = asyncio.run(ask(engine.endpoint))
        assert engine.stop(signal.SIGTERM) == 0
        log = engine.text()

    (worker,) = stats.workers
    assert worker.alive and (worker.decode, worker.demand, worker.streamed) == (
        stats.decode,
        stats.demand,
        stats.streamed,
    )
    assert 0 < worker.resident_slots <= LAYERS * EXPERTS

    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    assert (found["layers"], found["experts"]) == (LAYERS, EXPERTS)
    for mode in ("decode", "demand", "streamed"):
        counters = getattr(stats, mode)
        assert (sum(found[mode]["hits"]), sum(found[mode]["misses"])) == (counters.hits, counters.misses)
    steps = stats.decode.steps
    assert steps == 9 and [sum(row) for row in found["decode_routing"]] == [K * steps] * LAYERS

    for number, end in enumerate(ends):
        line = next(line for line in log.splitlines() if f"request id=r{number} " in line)
        told = dict(re.findall(r"(\w+)=(\S+)", line))
        assert (told["end"], told["prompt"], told["new"]) == ("length", "3", "4")
        assert (int(told["hits"]), int(told["misses"])) == (end.usage.expert_hits, end.usage.expert_misses)
