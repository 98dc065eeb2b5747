"""Runs the engine's answers to one HTTP request: several prompts, each with several choices, as one run of pieces.

Whoever leaves the `async with`, for whatever reason, ends what still runs: the engine stops within a step.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from msgspec import Struct

from copyengine.wire.errors import RequestRefused, SlotstreamError
from scheduler.client import Answer, Client
from scheduler.protocol import Choice, Finished, Logprobs, Sampling, Tokens, Usage

MAX_WAITING_TOKENS = 8192
"""Tokens of one HTTP request that wait for a client that reads slowly, minutes of a fast answer, some hundred kB; with
one more it is given up. Fewer would end who only pauses for a moment while a whole batch's answers arrive."""


class Prompt(Struct, frozen=True):
    """One prompt and how its answers, `sampling.n` of them, are drawn."""

    token_ids: list[int]
    sampling: Sampling


class Piece(Struct):
    """New tokens of one choice, in the order they were drawn. See protocol.Tokens of `text` and `logprobs`."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None


class End(Struct):
    """How one choice ended; nothing comes after it. `reason` is "stop" or "length"."""

    choice: int
    end: Choice


class Observer(Protocol):
    """Sees one choice. `began` once, `token` as often as new ones come, `ended` once."""

    def began(self, prompt_tokens: int) -> None:
        """It goes to the engine now; of several choices of one prompt each says so."""

    def token(self, count: int) -> None:
        """`count` new tokens came."""

    def ended(self, reason: str, end: Choice | None) -> None:
        """`reason` is "stop", "length", "abort" if the client left, or "error"; `end` has the first two's figures."""


class TooSlow(Exception):
    """The client reads so slowly that it is given up. Its connection is of no use any more."""


class Answering:
    """The answers to some prompts. Choice j of prompt i, of which all have n choices, has number `i * n + j`.

    ```python
    async with front.answer(prompts, request_id) as answering:
        await answering.accepted()
        async for batch in answering:
            for event in batch:
                match event:
                    case Piece(): ...
                    case End(): ...
        answering.usage
    ```
    `accepted` and iterating raise SlotstreamError if the engine refuses or fails any of the prompts, which ends them
    all, and TooSlow.
    """

    def __init__(
        self,
        client: Client,
        prompts: Sequence[Prompt],
        observe: Callable[[], Observer],
        request_id: str = "",
        running: "set[Answering] | None" = None,
    ) -> None:
        """`observe` makes an Observer of one choice. The engine's log calls the prompts `request_id` and a number.
        While it runs it is among `running`.
        """
        self._client = client
        self._prompts = prompts
        self._observe = observe
        self._request_id = request_id
        self._running = set() if running is None else running
        self._failure: SlotstreamError | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._events: list[Piece | End] = []
        self._waiting_tokens = 0
        self._stirred = asyncio.Event()  # something below changed, or there are events
        self._unaccepted = len(prompts)
        self._unended = len(prompts)
        self._places = [prompt.sampling.n for prompt in prompts]
        self._usages: list[Usage] = []

    @property
    def places(self) -> int:
        """Of the engine's places at least so many are taken: one by each choice that has not begun.

        Of those that have begun, only one of a prompt: when the others end the engine says with the last of them.
        """
        return sum(self._places)

    @property
    def usage(self) -> Usage:
        """The sum over all prompts, once all have ended."""
        names = Usage.__struct_fields__
        return Usage(**{name: sum(getattr(usage, name) for usage in self._usages) for name in names})

    async def __aenter__(self) -> Self:
        self._running.add(self)
        for i, prompt in enumerate(self._prompts):
            self._pumps.append(asyncio.create_task(self._pump(i, prompt)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.discard(self)
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)
        for pump in self._pumps:
            if not pump.cancelled():
                pump.exception()  # it is known, or of no interest any more

    def fail(self, error: SlotstreamError) -> None:
        """Have `error` raised to whoever waits for pieces."""
        self._failure = error
        self._stirred.set()

    async def accepted(self) -> None:
        """Wait until the engine has taken all prompts."""
        while self._unaccepted:
            await self._stir()

    async def __aiter__(self) -> AsyncGenerator[list[Piece | End], None]:
        """What has come since the last batch; of each choice at most one Piece and one End."""
        while self._unended or self._events:
            if self._events:
                batch, self._events, self._waiting_tokens = self._events, [], 0
                yield batch if len(batch) == 1 else merged(batch)
            else:
                await self._stir()

    async def _stir(self) -> None:
        """Wait until something has changed. Raises what a pump has ended with, or `fail` was told."""
        if self._failure:
            raise self._failure
        self._stirred.clear()
        for pump in self._pumps:
            if pump.done():
                pump.result()
        await self._stirred.wait()

    async def _pump(self, i: int, prompt: Prompt) -> None:
        n = prompt.sampling.n
        observers = [self._observe() for _ in range(n)]
        for observer in observers:
            observer.began(len(prompt.token_ids))
        reason = "abort"
        ends: list[Choice] = []
        try:
            answer = self._client.generate(
                token_ids=prompt.token_ids,
                sampling=prompt.sampling,
                request_id=f"{self._request_id}-{i}" if self._request_id else "",
                on_accepted=lambda _: self._accept(),
            )
            ends = await self._take(answer, i * n, observers)
        except SlotstreamError:
            reason = "error"
            raise
        finally:
            for j, observer in enumerate(observers):
                observer.ended(ends[j].reason if ends else reason, ends[j] if ends else None)
            self._stirred.set()

    async def _take(self, answer: Answer, first: int, observers: list[Observer]) -> list[Choice]:
        """Take the answer whose choice 0 is called `first`; how its choices ended."""
        i, n, begun = first // len(observers), len(observers), set[int]()
        async for tokens in answer:
            if tokens.token_ids and tokens.index not in begun:
                begun.add(tokens.index)
                self._places[i] = max(1, n - len(begun))
            self._add(first, tokens)
            observers[tokens.index].token(len(tokens.token_ids))
        assert answer.finished
        ends = choices_of(answer.finished)
        if any(end.reason == "abort" for end in ends):  # not by us: then nobody would wait for its end
            raise RequestRefused("draining", "the engine ended the answer")
        self._events.extend(End(first + j, end) for j, end in enumerate(ends))
        self._usages.append(answer.finished.usage)
        self._unended -= 1
        self._places[i] = 0
        return ends

    def _accept(self) -> None:
        self._unaccepted -= 1
        self._stirred.set()

    def _add(self, first: int, tokens: Tokens) -> None:
        self._waiting_tokens += len(tokens.token_ids)
        if self._waiting_tokens > MAX_WAITING_TOKENS:
            raise TooSlow(f"{self._waiting_tokens} tokens wait for a client that does not read them")
        self._events.append(Piece(first + tokens.index, tokens.text, tokens.token_ids, tokens.logprobs))
        self._stirred.set()


def choices_of(finished: Finished) -> list[Choice]:
    """How each choice ended, also if there is only one."""
    return finished.choices or [Choice(finished.reason, finished.usage, finished.timing)]


def merged(events: Sequence[Piece | End]) -> list[Piece | End]:
    """The same with one Piece for each choice; a choice's End is after it."""
    pieces: dict[int, Piece] = {}
    out: list[Piece | End] = []
    for event in events:
        earlier = pieces.get(event.choice)
        if isinstance(event, End) or earlier is None:
            out.append(event)
            if isinstance(event, Piece):
                pieces[event.choice] = event
            continue
        earlier.text += event.text
        earlier.token_ids = earlier.token_ids + event.token_ids
        if event.logprobs is not None:
            earlier.logprobs = (earlier.logprobs or []) + event.logprobs
    return out
