"""The client library: ask a running engine for answers.

```python
async with Client() as client:
    answer = client.generate(prompt="Once upon a time", sampling=Sampling(max_tokens=32))
    async for piece in answer:
        print(piece.text, end="", flush=True)
    print(answer.finished.usage)
```
`python -m scheduler.client` is the command line over it (scheduler/client_cli.py).
"""

import asyncio
import contextlib
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Self

import zmq.asyncio

from copyengine.wire.errors import ConfigError, PeerDied, PeerError, PeerTimeout, RequestRefused, SlotstreamError
from copyengine.wire.rpc_client import RpcClient
from scheduler.config import DEFAULT_PORT
from scheduler.protocol import (
    FINAL,
    Abort,
    Accepted,
    Activity,
    ActivityReply,
    Done,
    Failed,
    Finished,
    Flush,
    Generate,
    Health,
    HealthReply,
    Message,
    Reply,
    Request,
    Sampling,
    Stats,
    StatsReply,
    Tokens,
)

__all__ = [
    "DEFAULT_ENDPOINT",
    "Answer",
    "Client",
    "PeerDied",
    "PeerTimeout",
    "RequestRefused",
    "SlotstreamError",
]

DEFAULT_ENDPOINT = f"tcp://127.0.0.1:{DEFAULT_PORT}"
ANSWER_S = 5.0
"""Seconds within which the scheduler answers what needs no model: its loop is held up for 0.9 s at most. Shorter than
the watchdog's patience, so that a client hears of a hang before the restart."""

FLUSH_S = 60.0
"""The same for a flush, which waits for a step that is out, of requests whose clients have left: with a long chunk on a
slow CPU half a minute."""

SILENCE_S = 30.0
"""Seconds without any reply after which an answer is given up; the scheduler reports a waiting request more often."""


class Answer:
    """One answer, asked for when it is first iterated. Iterate it once.

    Leaving the loop early, for whatever reason, aborts the request. After the loop `finished` has the figures.
    Iterating raises RequestRefused if the request cannot be sent, or the engine refuses or fails it; PeerDied or
    PeerTimeout if the engine is gone.
    """

    def __init__(self, client: "Client", request: Generate, on_accepted: Callable[[Accepted], object]) -> None:
        self.request_id = request.request_id
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self._client = client
        self._request = request
        self._on_accepted = on_accepted
        self._iterated = False

    async def __aiter__(self) -> AsyncGenerator[Tokens, None]:
        """The pieces of the answer, as they come; if there are several, `index` says of which."""
        if self._iterated:
            raise RuntimeError("an answer can be iterated once")
        self._iterated = True
        over = False
        try:
            async with contextlib.aclosing(self._client._stream(self._request)) as replies:
                async for reply in replies:
                    match reply:
                        case Accepted():
                            self.accepted = reply
                            self._on_accepted(reply)
                        case Tokens(text="", token_ids=[]):
                            pass  # it still waits
                        case Tokens():
                            yield reply
                        case final:
                            over = True
                            self.finished = self._client._finished(final)
        except (PeerDied, RequestRefused):
            over = True
            raise
        finally:
            if not over:
                self._client._abort_soon(self.request_id)

    async def text(self) -> str:
        """The whole answer at once; the first, if several are asked for."""
        return (await self.texts())[0]

    async def texts(self) -> list[str]:
        """All answers at once: [sampling.n]."""
        texts: defaultdict[int, str] = defaultdict(str)
        async for piece in self:
            texts[piece.index] += piece.text
        return [texts[i] for i in range(self._request.sampling.n)]


class Client:
    """A connection to one engine. Use it as an async context manager, on one event loop."""

    def __init__(self, endpoint: str = DEFAULT_ENDPOINT) -> None:
        self.endpoint = endpoint
        self._context: zmq.asyncio.Context | None = None
        self._rpc: RpcClient[Request, Reply] | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Connect. ConfigError if the endpoint is none; that nobody is there shows only in what is asked."""
        context = zmq.asyncio.Context()
        try:
            self._rpc = RpcClient(context, self.endpoint, Reply, FINAL, Failed, "engine")
        except ConfigError:
            context.term()
            raise
        self._context = context
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rpc is None:  # it never connected
            return
        await self.settle()
        rpc, self._rpc = self._rpc, None
        await rpc.close()
        assert self._context
        self._context.term()

    def generate(
        self,
        *,
        prompt: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        sampling: Sampling | None = None,
        request_id: str = "",
        on_accepted: Callable[[Accepted], object] = lambda _: None,
    ) -> Answer:
        """An answer to exactly one of a text, token ids or a chat. `on_accepted` hears that the engine takes it."""
        request = Generate(
            prompt=prompt,
            token_ids=None if token_ids is None else list(token_ids),
            messages=None if messages is None else list(messages),
            sampling=sampling or Sampling(),
            request_id=request_id or secrets.token_hex(8),
        )
        return Answer(self, request, on_accepted)

    async def abort(self, request_id: str) -> None:
        """End a request of this client's; its answer finishes with reason "abort". No-op if it has ended."""
        await self._connection().expect(Abort(request_id), Done, ANSWER_S)

    async def flush(self) -> None:
        """Have the engine forget cached prefixes and the experts in its slots, as if it had just been started.

        RequestRefused("busy") while any request, of whomever, has not ended.
        """
        await self._connection().expect(Flush(), Done, FLUSH_S)

    async def health(self, deadline_s: float = ANSWER_S) -> HealthReply:
        """Whether the engine takes requests. PeerTimeout if nothing answers at the endpoint."""
        return await self._connection().expect(Health(), HealthReply, deadline_s)

    async def stats(self) -> StatsReply:
        """The engine's counters."""
        return await self._connection().expect(Stats(), StatsReply, ANSWER_S)

    async def activity(self) -> ActivityReply:
        """Which requests are where, and which experts are in the slots of which worker."""
        return await self._connection().expect(Activity(), ActivityReply, ANSWER_S)

    async def settle(self) -> None:
        """Wait until the aborts of answers left early are through."""
        while self._aborts:
            await asyncio.wait(self._aborts)

    def _connection(self) -> RpcClient[Request, Reply]:
        if self._rpc is None:
            raise RuntimeError("use the client inside `async with Client() as client:`")
        return self._rpc

    def _stream(self, request: Generate) -> AsyncGenerator[Reply, None]:
        return self._connection().stream(request, SILENCE_S)

    def _finished(self, reply: Reply) -> Finished:
        return self._connection().require(reply, Finished)

    def _abort_soon(self, request_id: str) -> None:
        """Not awaited: the iterator that was left may be in the middle of a cancellation or of garbage collection."""
        if self._rpc is not None:
            task = asyncio.get_running_loop().create_task(self._abort_quietly(request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort_quietly(self, request_id: str) -> None:
        with contextlib.suppress(PeerError):  # an engine that is gone has no request to abort
            await self.abort(request_id)
