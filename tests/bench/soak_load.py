"""Does a soak's acts against a running engine, and writes down how each request ended for its client."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from scheduler.client import Answer, Client, PeerDied, PeerTimeout, RequestRefused
from scheduler.protocol import Sampling
from tests.bench.soak_acts import Drawer, HttpAct, Sizes, ZmqAct
from tests.bench.soak_books import Asked

ACT_S = 120.0
"""Seconds within which every request has its end; the longest waits for a whole queue of others."""

USER_ACTS = 25
"""After so many a user connects anew, so that connections come and go too."""

BUSY = {"queue_full"}
DOWN = {"not_ready", "worker_failed", "engine_silent", "engine_gone", "draining"}
"""Errors that a good request may get under load, and while a killed process is started anew."""

CONTROLS = (8, 100, 400)
"""Tokens of the prompts that are asked again and again."""
CONTROL_NEW_TOKENS = 16
NEAR_TIE = 0.02
"""Two tokens whose log-probabilities are this close may change places when a batch of another size rounds otherwise;
a wrong expert or a wrong page of KV moves them by far more."""


@dataclass
class Ledger:
    """All that clients saw. `faults` are what must not happen, in words."""

    kills: bool = False
    asked: list[Asked] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    controls: int = 0
    near_ties: int = 0

    def write(self, one: Asked, refused: bool) -> None:
        """`refused`: it had to be."""
        self.asked.append(one)
        if refused and one.end == "ended":
            self.faults.append(f"{one.id} was answered, which nothing may do")
        fair = BUSY | DOWN if self.kills else BUSY
        if not refused and one.end == "error" and one.code not in fair:
            self.faults.append(f"{one.id or one.by} got the error {one.code}")
        if one.code == "hung":
            self.faults.append(f"{one.id or one.by} had no end within {ACT_S:g} s")


class Users:
    """Asks `endpoint` and `url`; every request is in `ledger`."""

    def __init__(self, endpoint: str, url: str, sizes: Sizes, ledger: Ledger) -> None:
        self.endpoint = endpoint
        self._url = url
        self._sizes = sizes
        self._ledger = ledger
        self._numbers = itertools.count(1)
        self._expected: dict[int, list[int]] = {}

    async def user(self, seed: int, end: asyncio.Event) -> None:
        """One of those who ask all the time, with a pause now and then, until `end`."""
        drawer = Drawer(self._sizes, seed)
        while not end.is_set():
            async with Client(self.endpoint) as client, httpx.AsyncClient(base_url=self._url, timeout=ACT_S) as http:
                for _ in range(USER_ACTS):
                    if end.is_set():
                        break
                    match drawer.act():
                        case ZmqAct() as act:
                            await self.by_zmq(client, act)
                        case act:
                            await self.by_http(http, act)
                    await asyncio.sleep(drawer.draw.expovariate(10.0))

    async def burst(self, count: int, seed: int) -> None:
        """`count` requests at once."""
        drawer = Drawer(self._sizes, seed)
        async with Client(self.endpoint) as client:
            await asyncio.gather(*(self.by_zmq(client, drawer.burst()) for _ in range(count)))

    async def control(self) -> None:
        """The same greedy prompts as ever, which have to be answered as ever."""
        async with Client(self.endpoint) as client:
            for length in CONTROLS:
                await self._control(client, length)

    async def by_zmq(self, client: Client, act: ZmqAct) -> None:
        """Ask, and leave as the act says."""
        request_id = f"soak-{next(self._numbers)}"
        if act.leaves != "vanishes":
            return await self._by_zmq(client, act, request_id)
        async with Client(self.endpoint) as own:
            await self._by_zmq(own, act, request_id)

    async def _by_zmq(self, client: Client, act: ZmqAct, request_id: str) -> None:
        request = act.request
        answer = client.generate(
            prompt=request.prompt,
            token_ids=request.token_ids,
            messages=request.messages,
            sampling=request.sampling,
            request_id=request_id,
        )
        tokens = 0
        try:
            async with asyncio.timeout(ACT_S):
                async for count in _taken(client, answer, act):
                    tokens += count
            end, code = ("ended", answer.finished.reason) if answer.finished else ("left", "")
        except RequestRefused as error:
            end, code = "error", error.code
        except (PeerDied, PeerTimeout) as error:
            end, code = ("left", "") if act.leaves == "vanishes" else ("lost", str(error))
        except TimeoutError:
            end, code = "lost", "hung"
        delivered = act.leaves != "vanishes" and end != "lost"
        self._ledger.write(Asked("zmq", request_id, end, code, tokens, delivered), act.refused)  # type: ignore[arg-type]

    async def by_http(self, http: httpx.AsyncClient, act: HttpAct) -> None:
        """Ask, and leave as the act says."""
        try:
            async with asyncio.timeout(ACT_S):
                one = await _posted(http, act)
        except TimeoutError:
            one = Asked("http", "", "lost", "hung")
        except httpx.TransportError as error:
            one = Asked("http", "", "lost", repr(error))
        self._ledger.write(one, act.refused)

    async def _control(self, client: Client, length: int) -> None:
        ids = [3 + (7 * i + length) % 97 for i in range(length)]
        sampling = Sampling(max_tokens=CONTROL_NEW_TOKENS, ignore_eos=True, logprobs=2)
        request_id = f"control-{next(self._numbers)}"
        answer = client.generate(token_ids=ids, sampling=sampling, request_id=request_id)
        tokens: list[int] = []
        gaps: list[float] = []
        try:
            async for piece in answer:
                tokens += piece.token_ids
                for place in piece.logprobs or []:
                    gaps.append(place.top[0].logprob - place.top[1].logprob)
        except RequestRefused as error:
            return self._ledger.write(Asked("zmq", request_id, "error", error.code, len(tokens)), False)
        except (PeerDied, PeerTimeout) as error:
            return self._ledger.write(Asked("zmq", request_id, "lost", str(error), len(tokens), False), False)
        assert answer.finished
        self._ledger.write(Asked("zmq", request_id, "ended", answer.finished.reason, len(tokens)), False)
        self._compare(self._expected.setdefault(length, tokens), tokens, gaps)

    def _compare(self, expected: list[int], tokens: list[int], gaps: list[float]) -> None:
        self._ledger.controls += 1
        if tokens == expected:
            return
        at = next((i for i, (a, b) in enumerate(zip(expected, tokens, strict=False)) if a != b), len(tokens))
        if at < len(gaps) and gaps[at] < NEAR_TIE:
            self._ledger.near_ties += 1
        else:
            self._ledger.faults.append(f"a control prompt was answered with {tokens} instead of {expected}")


async def _taken(client: Client, answer: Answer, act: ZmqAct) -> AsyncIterator[int]:
    """New tokens of each piece, until the end or until the client leaves."""
    pieces = 0
    async with contextlib.aclosing(answer.__aiter__()) as replies:
        async for piece in replies:
            pieces += 1
            yield len(piece.token_ids)
            if not act.leaves or pieces != act.after + 1:
                continue
            if act.leaves == "breaks off":
                return
            await (client.abort(answer.request_id) if act.leaves == "aborts" else client._connection().close())


async def _posted(http: httpx.AsyncClient, act: HttpAct) -> Asked:
    """One request, to its end or until its client leaves."""
    body: dict[str, Any] = {"content": act.body} if isinstance(act.body, bytes) else {"json": act.body}
    request = http.build_request("POST", act.path, headers={"content-type": "application/json"}, **body)
    patience_s = act.after / 50 if act.leaves and not act.stream else ACT_S + 1
    try:
        async with asyncio.timeout(patience_s):
            response = await http.send(request, stream=True)
            try:
                return await _read(response, act)
            finally:
                await response.aclose()
    except TimeoutError:
        return Asked("http", "", "left")


async def _read(response: httpx.Response, act: HttpAct) -> Asked:
    request_id = f"{response.headers.get('x-request-id', '')}-0"
    if response.status_code != 200 or not act.stream:
        reply = json.loads(await response.aread())
        if "error" in reply:
            return Asked("http", request_id, "error", reply["error"]["code"] or "")
        return Asked("http", request_id, "ended", "", reply["usage"]["completion_tokens"])
    events = tokens = 0
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        reply, events = json.loads(line.removeprefix("data: ")), events + 1
        if "error" in reply:
            return Asked("http", request_id, "error", reply["error"]["code"] or "")
        if act.leaves and events > act.after:
            return Asked("http", request_id, "left")
        if reply.get("usage"):
            tokens = reply["usage"]["completion_tokens"]
    return Asked("http", request_id, "ended", "", tokens)
