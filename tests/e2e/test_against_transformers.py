"""Greedy text through launch.py, scheduler, workers and copy engine, against transformers' own implementation."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from scheduler.client import Client
from scheduler.protocol import Sampling, StatsReply
from tests.e2e.engine import running
from tests.worker.transformers_oracle import CASES, NEW_TOKENS, PROMPT_TOKENS

AT_ONCE = 4
SMALL_CHUNKS = ("--workers", "2", "--chunked-prefill-size", "16", "--kv-tokens", "640", "--max-running-requests", "3")


async def ask(endpoint: str, prompt: list[int]) -> tuple[list[list[int]], StatsReply]:
    """The greedy answers of several clients at once, and the counters afterwards."""
    async with Client(endpoint) as client:

        async def one() -> list[int]:
            answer = client.generate(token_ids=prompt, sampling=Sampling(max_tokens=NEW_TOKENS, ignore_eos=True))
            return [token async for piece in answer for token in piece.token_ids]

        return await asyncio.gather(*(one() for _ in range(AT_ONCE))), await client.stats()


@pytest.mark.parametrize(
    ("case", "demand_tokens", "flags"),
    [
        ("e60_k2_tied", 512, ()),
        ("e60_k2_tied", 0, ("--served-model-name", "witness", "--copy-engine", "thread")),
        ("e128_k8_sharded", 512, SMALL_CHUNKS),
        ("dense", 512, SMALL_CHUNKS),
        ("gpt_oss_mxfp4", 512, ("--chunked-prefill-size", "16", "--max-running-requests", "3")),
        ("qwen3_next", 512, ("--chunked-prefill-size", "16", "--max-running-requests", "3")),
    ],
)
def test_the_continuation_is_token_for_token_the_same(
    goldens: Path, case: str, demand_tokens: int, flags: tuple[str, ...]
) -> None:
    ids = [int(token) for token in np.load(goldens / f"{case}.npz")["ids"]]
    model = ("--model", str(goldens / case), "--dtype", "float32", "--demand-tokens", str(demand_tokens))
    with running(*model, *flags) as engine:
        answers, stats = asyncio.run(ask(engine.endpoint, ids[:PROMPT_TOKENS]))
        assert answers == [ids[PROMPT_TOKENS:]] * AT_ONCE
        assert engine.fact("model").startswith("witness " if "witness" in flags else case)
        assert engine.fact("workers").startswith("2 " if "--workers" in flags else "1 ")
    assert stats.state_slots_total == (3 + 16 if case == "qwen3_next" else 0)
    if case == "qwen3_next":  # the last one starts from a snapshot behind 32 tokens
        assert stats.cached_tokens >= 32 and stats.state_snapshots > 0 and stats.state_nbytes > 0
    if case == "gpt_oss_mxfp4":  # the last one finds the first 32 tokens, more than a window, in the pages of others
        assert stats.cached_tokens >= 32
    mode, other = (stats.demand, stats.streamed) if demand_tokens else (stats.streamed, stats.demand)
    if case == "dense":
        assert stats.demand.steps == 0 and stats.demand.lookups == stats.streamed.lookups == 0
        return
    assert mode.steps > 0 and other.steps == 0
    if not demand_tokens:  # every prefill step makes all experts of all layers available
        assert mode.lookups == mode.steps * CASES[case]["num_experts"] * 3
