"""What the server keeps about the requests it serves."""

import asyncio
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from copyengine.wire.errors import PeerDied
from copyengine.wire.rpc_server import ReadsNothing
from scheduler.choices import Choices
from scheduler.core import BAD_LOGITS
from scheduler.grammar import Grammars
from scheduler.lane import Lane
from scheduler.protocol import Failed, Finished, Tokens
from scheduler.request import Request
from scheduler.timed_threads import KEEPALIVE_S
from scheduler.tokenize import TextCodec


class Service(Struct, frozen=True):
    """What it takes to serve, known once the workers have loaded."""

    text: TextCodec
    vocab_size: int
    max_model_len: int
    max_queued: int
    demand_tokens: int  # the threshold in force: 0 for a dense model
    lanes: list[Lane]
    grammars: Grammars | None = None  # None if the tokenizer is none for them, or there is none


class ClientOutbox:
    """See scheduler.lane.Outbox: tokens go to the client at once, the final reply to who waits for it.

    `send` sends one reply, or raises PeerDied, which ends the wait; of a client that is there and reads nothing, with a
    reply that it finds if it reads again.
    """

    def __init__(self, send: Callable[[Tokens], None]) -> None:
        self.final: Finished | Failed | None = None  # the first one put; also when the client is gone by then
        self._send = send
        self._gone: PeerDied | None = None
        self._over = asyncio.Event()
        self._quiet = False  # since the last keepalive was due

    def put_nowait(self, message: Tokens | Finished | Failed) -> None:
        """Nothing counts that comes after the first final reply."""
        if not isinstance(message, Tokens):
            self.final = self.final or message
            self._over.set()
        elif (message.text or message.token_ids) and not self._over.is_set():
            self._try_to_send(message)

    def say_it_waits(self) -> None:
        """Send an empty Tokens. PeerDied if the client is gone."""
        self._try_to_send(Tokens("", []))
        if self._gone:
            raise self._gone

    async def end(self) -> Finished | Failed:
        """The final reply, once it is there. PeerDied if the client is gone."""
        while not self._over.is_set():
            try:
                async with asyncio.timeout(KEEPALIVE_S):
                    await self._over.wait()
            except TimeoutError:
                if self._quiet:
                    self._try_to_send(Tokens("", []))
                self._quiet = True
        if self._gone:
            raise self._gone
        assert self.final
        return self.final

    def _try_to_send(self, tokens: Tokens) -> None:
        self._quiet = False
        try:
            self._send(tokens)
        except ReadsNothing as error:
            self.put_nowait(Failed("too_slow", str(error)))
        except PeerDied as error:
            self._gone = error
            self._over.set()


class Ticket:
    """One Generate from its arrival to its final reply."""

    def __init__(self, send: Callable[[Tokens], None]) -> None:
        self.outbox = ClientOutbox(send)
        self.aborted = False
        self.arrived_s = time.monotonic()
        self.request: Request | None = None  # once it is accepted
        self.lane: Lane | None = None
        self.choices: Choices | None = None  # if several answers are asked for: `request` is the first

    @property
    def served(self) -> Sequence[Request]:
        """The request of each answer that a lane has, those that have ended included; none once all is over."""
        if self.lane is None or self.request is None or self.outbox.final:
            return ()
        return self.choices.requests if self.choices else (self.request,)

    def so_far(self, now_s: float) -> Finished:
        """The figures of an accepted one that ends without any."""
        assert self.request
        return self.choices.so_far(now_s) if self.choices else self.request.finished("abort", now_s)


class Tally(Struct):
    """Each accepted request is counted in exactly one of the first three, when it is over; the others in `refused`. Of
    those that failed `not_finite` did for what the model computed."""

    finished: int = 0
    failed: int = 0
    aborted: int = 0
    refused: int = 0
    not_finite: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def count(self, ticket: Ticket) -> None:
        """`ticket` is over; no-op for one that was refused. Aborted is also whose client left before its end."""
        if ticket.request is None:
            return
        match ticket.outbox.final:
            case Failed(code=code):
                self.failed += 1
                self.not_finite += code == BAD_LOGITS.code
            case Finished(reason="stop" | "length"):
                self.finished += 1
            case _:
                self.aborted += 1
