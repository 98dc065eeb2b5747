"""More requests at once than the engine takes, against its limits and against the same requests asked one by one."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from scheduler.client import Client, RequestRefused
from tests.e2e.crowd import (
    LOOPS,
    HttpClient,
    engine_on,
    http_port,
    prompt_of,
    resident_nbytes,
    sampling,
    settled,
    stats_of,
    stretch,
    write_small_model,
)
from tests.e2e.engine import Engine

ASKED, RUNNING, QUEUED = 200, 18, 32
PLACES = RUNNING + QUEUED
assert ASKED == 4 * PLACES
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 10, 24, 6

REFUSED_S = 0.1
"""From sending to refusal, where processors have nothing else to do: beside as many other processes again it takes
twice as long. So it is multiplied by how many times as long a busy loop takes as it should."""

WAVES = 3
"""And of some waves, all of whose refusals must be right, the quickest one has to be quick enough."""

MORE_NBYTES = 24 * 2**20
"""That a process may take more after so many requests than before: allocators keep some of what they had."""


class Heard(NamedTuple):
    """How a request went."""

    refused: bool
    took_s: float  # from sending it to its refusal or its end
    tokens: list[int] | str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module", params=LOOPS)
def small(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    limits = ("--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED))
    with engine_on(request.param, model, *limits) as engine:
        yield engine


async def by_zmq(engine: Engine, numbers: range) -> list[Heard]:
    """Timed by the client's clock around the whole call of the library."""
    async with Client(engine.endpoint) as client:

        async def one(number: int) -> Heard:
            answer = client.generate(
                token_ids=prompt_of(number % PROMPTS, PROMPT_TOKENS), sampling=sampling(NEW_TOKENS)
            )
            start_s = time.monotonic()
            try:
                tokens = [token async for piece in answer for token in piece.token_ids]
            except RequestRefused as refused:
                assert refused.code == "queue_full" and f"is {QUEUED}" in refused.detail
                return Heard(True, time.monotonic() - start_s, [])
            return Heard(False, time.monotonic() - start_s, tokens)

        return await asyncio.gather(*map(one, numbers))


async def by_http(engine: Engine, numbers: range) -> list[Heard]:
    """From writing the request, over connections that are there, to the first line of the answer."""
    clients = [HttpClient(http_port(engine)) for _ in numbers]
    for client in clients:
        await client.connect()

    async def one(client: HttpClient, number: int) -> Heard:
        prompt = prompt_of(number % PROMPTS, PROMPT_TOKENS)
        got = await client.ask(prompt=prompt, max_tokens=NEW_TOKENS, logprobs=0)
        body = msgspec.json.decode(got.body)
        if got.status == 429:
            assert body["error"]["code"] == "queue_full"
            return Heard(True, got.took_s, [])
        assert got.status == 200, body
        return Heard(False, got.took_s, body["choices"][0]["text"])

    return await asyncio.gather(*map(one, clients, numbers))


@pytest.mark.parametrize("ask", [by_zmq, by_http])
def test_what_is_too_much_is_refused_at_once_and_the_rest_finishes(
    small: Engine, ask: Callable[[Engine, range], Awaitable[list[Heard]]]
) -> None:
    """200 requests at once, four times what may run and wait; also the wave after finds all in its place again."""

    async def asked(numbers: range) -> list[Heard]:
        return await ask(small, numbers)

    alone = [asyncio.run(asked(range(number, number + 1)))[0] for number in range(PROMPTS)]
    assert not any(heard.refused for heard in alone)
    asyncio.run(asked(range(ASKED)))
    settled(small)
    before, before_nbytes = stats_of(small), resident_nbytes(small)
    late, finished = list[float](), 0
    for _ in range(WAVES):
        stretched = stretch()
        heard = asyncio.run(asked(range(ASKED)))
        stretched = max(stretched, stretch())
        refused = [one.took_s for one in heard if one.refused]
        assert ASKED - 2 * PLACES < len(refused) <= ASKED - PLACES, "one that ends soon makes room for one more"
        finished += ASKED - len(refused)
        assert all(one.tokens == alone[i % PROMPTS].tokens for i, one in enumerate(heard) if not one.refused)
        after = settled(small)
        assert after.finished - before.finished == finished
        assert (after.failed, after.aborted) == (before.failed, before.aborted)
        late.append(max(refused) / stretched)
        if late[-1] <= REFUSED_S:
            break
    assert min(late) <= REFUSED_S, late
    now_nbytes = resident_nbytes(small)
    assert all(now_nbytes[name] - before_nbytes[name] < MORE_NBYTES for name in now_nbytes), (before_nbytes, now_nbytes)
