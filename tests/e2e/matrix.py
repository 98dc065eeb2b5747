"""The same requests under all conditions that must not change their answers, and what of the answers differs.

An *arm* is a way to start the engine: how prompts are cut, whether experts are fetched on demand or streamed, how many
workers there are. In each arm the same requests are asked alone and together, with nothing cached and over what was.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scheduler.client import Client
from scheduler.protocol import Logprobs, Sampling
from tests.e2e.engine import Engine

AT_ONCE = 8
"""Requests of a batch."""


class Arm(NamedTuple):
    """Flags of one start."""

    chunk: int
    streamed: bool
    workers: int
    more: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """For launch.py."""
        demand = 0 if self.streamed else 8192
        sizes = ("--chunked-prefill-size", str(self.chunk), "--demand-tokens", str(demand))
        return (*sizes, "--workers", str(self.workers), *self.more)


WHOLE = 1024
"""Tokens of a chunk that takes any of the prompts whole."""


class Ask(NamedTuple):
    """One request."""

    prompt: list[int]
    sampling: Sampling


class Told(NamedTuple):
    """One token of an answer: what was drawn, its log-probability, and how far it lies above the next likely one."""

    token: int
    logprob: float
    gap: float


Answer = list[list[Told]]
"""Each of `n`."""


def greedy_asks(vocab: int, lengths: Sequence[int], new_tokens: int, seed: int = 1) -> list[Ask]:
    """Of these lengths; each begins with the first half of the one before it, as far as that goes."""
    rng = random.Random(seed)
    asks, before = list[Ask](), list[int]()
    sampling = Sampling(max_tokens=new_tokens, ignore_eos=True, logprobs=2)
    for length in lengths:
        shared = before[: min(len(before) // 2, length - 1)]
        before = [*shared, *(rng.randrange(vocab) for _ in range(length - len(shared)))]
        asks.append(Ask(before, sampling))
    return asks


def drawn_asks(vocab: int, new_tokens: int, seed: int = 2) -> list[Ask]:
    """Drawn by a seed, with penalties, and several answers to one prompt."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in (70, 131)]
    common = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 2}
    penalised = Sampling(temperature=0.9, seed=7, repetition_penalty=1.3, frequency_penalty=0.4, **common)  # type: ignore[arg-type]
    several = Sampling(temperature=1.1, seed=8, top_k=40, top_p=0.9, min_p=0.01, n=2, **common)  # type: ignore[arg-type]
    return [Ask(prompts[0], penalised), Ask(prompts[1], several)]


def turns(asks: Sequence[Ask], answers: Sequence[Answer], vocab: int) -> list[Ask]:
    """The next turn over each: its prompt, its first answer, and some more."""
    rng = random.Random(len(asks))
    more = [rng.randrange(vocab) for _ in range(7)]
    told = ([told.token for told in choices[0]] for choices in answers)
    return [ask._replace(prompt=[*ask.prompt, *tokens, *more]) for ask, tokens in zip(asks, told, strict=True)]


async def answer(client: Client, ask: Ask) -> Answer:
    """What comes of it."""
    told: Answer = [[] for _ in range(ask.sampling.n)]
    async for piece in client.generate(token_ids=ask.prompt, sampling=ask.sampling):
        assert piece.logprobs is not None
        told[piece.index] += map(_told, piece.logprobs)
    return told


def _told(logprobs: Logprobs) -> Told:
    first, second = logprobs.top
    return Told(logprobs.drawn.token_id, logprobs.drawn.logprob, first.logprob - second.logprob)


async def alone(client: Client, asks: Sequence[Ask], flush: bool) -> list[Answer]:
    """One after the other; with `flush` nothing is cached or in slots when one begins."""
    answers = []
    for ask in asks:
        if flush:
            await client.flush()
        answers.append(await answer(client, ask))
    return answers


async def together(client: Client, asks: Sequence[Ask], vocab: int) -> list[Answer]:
    """All at once, beside as many others as it takes, some of which end early."""
    rng = random.Random(len(asks))
    others = [
        Ask(
            [rng.randrange(vocab) for _ in range(rng.randrange(1, 200))],
            Sampling(max_tokens=5 + 9 * i, temperature=1.0, ignore_eos=True, logprobs=2),
        )
        for i in range(AT_ONCE - sum(ask.sampling.n for ask in asks))
    ]
    answers = await asyncio.gather(*(answer(client, ask) for ask in (*asks, *others)))
    return list(answers[: len(asks)])


def answers_cold(engine: Engine, asks: Sequence[Ask]) -> list[Answer]:
    """Each alone, with nothing cached and no expert in slots."""
    found = list[Answer]()

    async def session(client: Client) -> None:
        found.extend(await alone(client, asks, flush=True))

    engine.over(session)
    return found


def rounds(engine: Engine, asks: Sequence[Ask], vocab: int) -> dict[str, list[Answer]]:
    """The answers to `asks` in every other condition. "warm" are those over what the ones before have left."""
    found = dict[str, list[Answer]]()

    async def session(client: Client) -> None:
        found["alone, warm"] = await alone(client, asks, flush=False)
        found["together, warm"] = await together(client, asks, vocab)
        await client.flush()
        found["together, cold"] = await together(client, asks, vocab)

    engine.over(session)
    return found


class Difference(NamedTuple):
    """Where two answers part: at which token, and how far the two likeliest ones were apart there in the first."""

    at: int
    gap: float


def difference(one: Sequence[Told], other: Sequence[Told]) -> Difference | None:
    """The first place with another token."""
    for at, (a, b) in enumerate(zip(one, other, strict=True)):
        if a.token != b.token:
            return Difference(at, a.gap)
    return None


def noise(one: Sequence[Told], other: Sequence[Told]) -> Iterator[float]:
    """By how much log-probabilities differ, up to where the answers part."""
    for a, b in zip(one, other, strict=True):
        if a.token != b.token:
            return
        yield abs(a.logprob - b.logprob)
