"""More requests at once than the engine takes, and requests that are dropped at random moments.

Answers are checked against the same requests asked alone, what is left against what was there before.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import zmq
import zmq.asyncio

from copyengine.wire.codec import Codec
from scheduler.client import Client, RequestRefused
from scheduler.protocol import Accepted, Generate, Reply, Tokens
from tests.e2e.crowd import (
    AND_CUDA,
    HttpClient,
    Standing,
    engine_on,
    http_port,
    prompt_of,
    resident_nbytes,
    sampling,
    settled,
    standing,
    stretch,
    tokens_of,
    write_small_model,
)
from tests.e2e.engine import Engine

ASKED, RUNNING, QUEUED = 200, 18, 32
PLACES = RUNNING + QUEUED
assert ASKED == 4 * PLACES
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 12, 40, 8

CHUNKS = ("--chunked-prefill-size", "256")
"""So that what the worker takes for its largest step is there after a few, and growth would be seen beside it."""

REFUSED_S = 0.1
"""From sending to refusal, where processors have nothing else to do: beside as many other processes again it takes
twice as long. So it is multiplied by how many times as long a busy loop takes as it should."""

WAVES = 3
"""And of some waves, all of whose refusals must be right, the quickest one has to be quick enough."""

MORE_NBYTES = 32 * 2**20
"""That a process may take more after so many requests than before: allocators keep some of what they had."""


class Heard(NamedTuple):
    """How a request went."""

    refused: bool
    took_s: float  # from sending it to its refusal or its end
    tokens: list[int] | str


@pytest.fixture(scope="module")
def task_counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module", params=AND_CUDA)
def small(
    tmp_path_factory: pytest.TempPathFactory, task_counts: Path, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    limits = ("--max-running-requests", str(RUNNING), "--max-queued-requests", str(QUEUED))
    model = write_small_model(tmp_path_factory.mktemp("small"))
    with engine_on(request.param, model, *limits, *CHUNKS, task_counts=task_counts) as engine:
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
    before, before_nbytes = small.stats(), resident_nbytes(small)
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


ALL = 1000
AT_ONCE = 30
"""More than run, and few, since who left while it waited keeps its place until it is sent something."""
MOMENT_S = 0.25
"""Random times at which a client leaves end here: some come before its request is accepted, some while it waits or is
prefilled, some between tokens."""

WAYS = ("task", "abort", "socket", "http", "http, not streamed")


class Droppers:
    """Requests in all ways, every second one of which is dropped at a random moment."""

    def __init__(self, engine: Engine, expected: list[list[int]], texts: list[str], seed: int) -> None:
        self.engine, self.expected, self.texts = engine, expected, texts
        self.random = random.Random(seed)
        self.wrong: list[object] = []
        self.served: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    async def run(self, count: int, at_once: int) -> None:
        room = asyncio.Semaphore(at_once)
        async with Client(self.engine.endpoint) as client:

            async def one(number: int) -> None:
                async with room:
                    await self._one(client, number)

            await asyncio.gather(*map(one, range(count)))

    async def _one(self, client: Client, number: int) -> None:
        way, drop, which = WAYS[number % len(WAYS)], number // len(WAYS) % 2 == 1, number % PROMPTS
        prompt, after_s = prompt_of(which, PROMPT_TOKENS), self.random.random() ** 2 * MOMENT_S
        tokens = self.random.choice([None, 1, 3, NEW_TOKENS])  # leave with this one instead
        if way == "task":
            await self._task(client, which, prompt, drop, after_s, tokens)
        elif way == "abort":
            await self._abort(client, which, prompt, drop, after_s)
        elif way == "socket":
            await self._socket(which, prompt, drop, after_s, tokens)
        else:
            await self._http(which, prompt, drop, after_s, tokens, way == "http")

    def _count(self, way: str, drop: bool, right: bool, got: object) -> None:
        (self.dropped if drop else self.served)[way] += 1
        if not drop and not right:
            self.wrong.append((way, got))

    async def _task(
        self, client: Client, which: int, prompt: list[int], drop: bool, after_s: float, tokens: int | None
    ) -> None:
        """The library; who leaves the loop, or whose task is cancelled, has its request aborted."""
        got: list[int] = []

        async def take() -> None:
            async for piece in client.generate(token_ids=prompt, sampling=sampling(NEW_TOKENS)):
                got.extend(piece.token_ids)
                if drop and tokens is not None and len(got) >= tokens:
                    return

        task = asyncio.create_task(take())
        if drop and tokens is None:
            await asyncio.wait({task}, timeout=after_s)
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        self._count("task", drop, got == self.expected[which], got)

    async def _abort(self, client: Client, which: int, prompt: list[int], drop: bool, after_s: float) -> None:
        """Abort by its name, while somebody waits for the end."""
        answer = client.generate(token_ids=prompt, sampling=sampling(NEW_TOKENS))

        async def take() -> list[int]:
            return [token async for piece in answer for token in piece.token_ids]

        task = asyncio.create_task(take())
        if drop:
            await asyncio.wait({task}, timeout=after_s)
            await client.abort(answer.request_id)
        got = await task
        assert answer.finished
        right = got == self.expected[which] and answer.finished.reason == "length"
        assert right or (drop and answer.finished.reason in ("abort", "length"))
        self._count("abort", drop, right, got)

    async def _socket(self, which: int, prompt: list[int], drop: bool, after_s: float, tokens: int | None) -> None:
        """A socket of its own, closed without a word."""
        context = zmq.asyncio.Context.instance()
        request, reply = Codec[Generate](Generate), Codec[Reply](Reply)
        got: list[int] = []
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.engine.endpoint)
            frame = request.encode(Generate(token_ids=prompt, sampling=sampling(NEW_TOKENS)))
            await socket.send_multipart([b"%08d" % 1, frame])

            async def take() -> None:
                while True:
                    match reply.decode((await socket.recv_multipart())[1]):
                        case Tokens(token_ids=ids):
                            got.extend(ids)
                            if drop and tokens is not None and len(got) >= tokens:
                                return
                        case Accepted():
                            pass
                        case _:
                            return

            deadline_s = after_s if drop and tokens is None else 60
            try:
                async with asyncio.timeout(deadline_s):
                    await take()
            except TimeoutError:
                assert drop
        self._count("socket", drop, got == self.expected[which], got)

    async def _http(
        self, which: int, prompt: list[int], drop: bool, after_s: float, tokens: int | None, stream: bool
    ) -> None:
        """A connection that is closed, or cut off hard."""
        client = HttpClient(http_port(self.engine))
        await client.connect()
        client.send(prompt=prompt, max_tokens=NEW_TOKENS, stream=stream)
        got = b""

        async def take() -> None:
            nonlocal got
            while part := await client.reader.read(65536):
                got += part
                if drop and tokens is not None and got.count(b"data: ") >= tokens:
                    return

        try:
            async with asyncio.timeout(after_s if drop and (tokens is None or not stream) else 60):
                await take()
        except TimeoutError:
            assert drop
        client.close(hard=self.random.random() < 0.5)
        self._count("http", drop, drop or self._text(got, stream) == self.texts[which], got)

    @staticmethod
    def _text(got: bytes, stream: bool) -> str:
        if not stream:
            body = got[got.index(b"\r\n\r\n") + 4 :]
            return str(msgspec.json.decode(body)["choices"][0]["text"])
        lines = [line[6:] for line in got.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: {")]
        return "".join(choice["text"] for line in lines for choice in msgspec.json.decode(line)["choices"])


def warmed_up(engine: Engine, task_counts: Path, expected: list[list[int]], texts: list[str]) -> Standing:
    """What the processes hold once each has made all that it makes when it is first needed: threads, say."""
    asyncio.run(Droppers(engine, expected, texts, seed=0).run(100, AT_ONCE))
    settled(engine)
    time.sleep(1.5)  # connections that were cut off are noticed
    return standing(engine, task_counts)


@pytest.mark.timeout(400)
def test_half_of_a_thousand_requests_dropped_at_random_moments_leave_nothing(small: Engine, task_counts: Path) -> None:
    """By the library, by Abort, by a socket that is closed, and over HTTP, streamed and not."""

    async def alone() -> tuple[list[list[int]], list[str]]:
        tokens, texts = [], []
        async with Client(small.endpoint) as client:
            for number in range(PROMPTS):
                prompt = prompt_of(number, PROMPT_TOKENS)
                tokens.append(await tokens_of(client, prompt, NEW_TOKENS))
                texts.append(await client.generate(token_ids=prompt, sampling=sampling(NEW_TOKENS)).text())
        return tokens, texts

    expected, texts = asyncio.run(alone())
    as_before = warmed_up(small, task_counts, expected, texts)
    assert all(as_before.tasks.values()) and set(as_before.tasks) == set(as_before.threads)
    before = small.stats()
    crowd = Droppers(small, expected, texts, seed=1)
    asyncio.run(crowd.run(ALL, AT_ONCE))
    after = settled(small, as_before, task_counts)
    assert crowd.wrong == []
    assert (crowd.served.total(), crowd.dropped.total()) == (ALL // 2, ALL // 2)
    finished, aborted = after.finished - before.finished, after.aborted - before.aborted
    accepted = (after.prompt_tokens - before.prompt_tokens) // PROMPT_TOKENS
    assert accepted == finished + aborted and after.failed == before.failed
    assert ALL // 2 <= finished < ALL * 3 // 4 and ALL // 8 < aborted <= ALL // 2, (finished, aborted)
    assert after.refused - before.refused == after.dropped_frames - before.dropped_frames == 0
