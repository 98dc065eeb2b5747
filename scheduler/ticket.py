"""What the server keeps about the requests it serves."""

import asyncio
import time

from msgspec import Struct

from scheduler.lane import Lane, Outbox
from scheduler.protocol import Failed, Finished, Tokens
from scheduler.request import Request
from scheduler.tokenize import TextCodec

KEEPALIVE_S = 5.0
"""A request that waits this long gets an empty Tokens: its client sees that we live, and we see whether it does."""


class Service(Struct, frozen=True):
    """What it takes to serve, known once the workers have loaded."""

    text: TextCodec
    vocab_size: int
    max_model_len: int
    max_queued: int
    demand_tokens: int  # the threshold in force: 0 for a dense model
    lanes: list[Lane]


class Ticket:
    """One Generate from its arrival to its final reply."""

    def __init__(self) -> None:
        self.outbox: Outbox = asyncio.Queue()
        self.aborted = False
        self.arrived_s = time.monotonic()
        self.request: Request | None = None  # once it is accepted
        self.lane: Lane | None = None
        self.final: Finished | Failed | None = None  # taken from the outbox to be sent

    async def next_replies(self) -> tuple[Tokens, Finished | Failed | None]:
        """All tokens that are there as one reply, and the final reply if it is there. Empty after KEEPALIVE_S."""
        text, token_ids = "", list[int]()
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                message = await self.outbox.get()
        except TimeoutError:
            return Tokens("", []), None
        while isinstance(message, Tokens):
            text += message.text
            token_ids += message.token_ids
            if self.outbox.empty():
                return Tokens(text, token_ids), None
            message = self.outbox.get_nowait()
        return Tokens(text, token_ids), message


class Tally(Struct):
    """Each accepted request is counted in exactly one of the first three, when it is over."""

    finished: int = 0
    failed: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def count(self, ticket: Ticket) -> None:
        """`ticket` is over; no-op for one that was refused. Aborted is also whose client left before its end."""
        if ticket.request is None:
            return
        match ticket.final:
            case Failed():
                self.failed += 1
            case Finished(reason="stop" | "length"):
                self.finished += 1
            case _:
                self.aborted += 1
