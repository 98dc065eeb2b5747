"""Greedy text through launch.py, scheduler, worker and copy engine, against transformers' own implementation."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from scheduler.client import Client
from scheduler.protocol import Sampling
from tests.e2e.engine import running
from tests.worker.transformers_oracle import NEW_TOKENS, PROMPT_TOKENS


@pytest.mark.parametrize("case", ["e60_k2_tied", "e128_k8_sharded", "dense"])
@pytest.mark.parametrize("demand_tokens", [0, 512])
def test_the_continuation_is_token_for_token_the_same(goldens: Path, case: str, demand_tokens: int) -> None:
    if (case, demand_tokens) == ("dense", 0):
        pytest.skip("a dense model knows no threshold")
    ids = [int(token) for token in np.load(goldens / f"{case}.npz")["ids"]]

    async def ask(endpoint: str) -> list[int]:
        async with Client(endpoint) as client:
            answer = client.generate(
                token_ids=ids[:PROMPT_TOKENS], sampling=Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
            )
            return [token async for piece in answer for token in piece.token_ids]

    with running("--model", str(goldens / case), "--demand-tokens", str(demand_tokens), "--dtype", "float32") as engine:
        assert asyncio.run(ask(engine.endpoint)) == ids[PROMPT_TOKENS:]
