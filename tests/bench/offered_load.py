"""Load from many clients at once: each has a connection of its own and asks again as soon as it has its answer."""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.client import Client
from scheduler.protocol import Sampling


@dataclass(frozen=True)
class Load:
    """What is asked: every client asks `answers` times, with prompts of its own."""

    clients: int
    answers: int
    prompt_tokens: int
    new_tokens: int
    vocab_size: int

    @property
    def tokens(self) -> int:
        """New tokens in all."""
        return self.clients * self.answers * self.new_tokens


@dataclass
class Served:
    """How it was answered: seconds of each answer, as its client saw them."""

    load: Load
    wall_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    pieces: int = 0  # replies that brought the tokens

    @property
    def requests_per_s(self) -> float:
        """Answers over the time of them all."""
        return len(self.ttft_s) / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """New tokens over the time of them all."""
        return self.load.tokens / self.wall_s


async def offer(endpoint: str, load: Load, seed: int = 0) -> Served:
    """Ask, and wait for all. AssertionError for an answer that is not as long as asked."""
    served = Served(load)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(endpoint)) for _ in range(load.clients)]
        await asyncio.gather(*(client.health() for client in clients))  # they are connected
        start_s = time.perf_counter()
        await asyncio.gather(*(_converse(client, load, seed + i, served) for i, client in enumerate(clients)))
        served.wall_s = time.perf_counter() - start_s
    return served


async def _converse(client: Client, load: Load, seed: int, served: Served) -> None:
    draw = random.Random(seed)
    for _ in range(load.answers):
        ids = [draw.randrange(3, load.vocab_size) for _ in range(load.prompt_tokens)]
        sampling = Sampling(temperature=1.0, seed=seed, max_tokens=load.new_tokens, ignore_eos=True)
        start_s, first_s, tokens = time.perf_counter(), 0.0, 0
        async for piece in client.generate(token_ids=ids, sampling=sampling):
            last_s = time.perf_counter()
            first_s = first_s or last_s
            tokens += len(piece.token_ids)
            served.pieces += 1
        assert tokens == load.new_tokens, f"{tokens} tokens instead of {load.new_tokens}"
        served.ttft_s.append(first_s - start_s)
        if tokens > 1:
            served.tpot_s.append((last_s - first_s) / (tokens - 1))


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99; the largest for fewer than 100."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    return statistics.median(values), statistics.quantiles(values, n=100, method="inclusive")[98]
