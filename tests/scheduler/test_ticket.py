"""Where a request's replies go: what reaches the client, in which order, and how the wait for the end ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from copyengine.wire.errors import PeerDied
from copyengine.wire.loop import run
from copyengine.wire.rpc_server import ReadsNothing
from scheduler.protocol import Failed, Finished, Timing, Tokens, Usage
from scheduler.ticket import ClientOutbox

FINISHED = Finished("stop", Usage(1, 1, 0, 1, 0, 0, 0, 0), Timing(0.0, 0.0, 0.0, 0.0))


class Client:
    """Takes replies, or is gone."""

    def __init__(self) -> None:
        self.got: list[Tokens] = []
        self.error: PeerDied | None = None

    def send(self, tokens: Tokens) -> None:
        if self.error:
            raise self.error
        self.got.append(tokens)


def with_outbox(main: Callable[[Client, ClientOutbox], Coroutine[Any, Any, None]]) -> None:
    async def test() -> None:
        client = Client()
        await main(client, ClientOutbox(client.send))

    run(test(), "selector")


def test_tokens_go_at_once_and_the_first_end_counts() -> None:
    async def main(client: Client, outbox: ClientOutbox) -> None:
        for message in (Tokens("a", [1]), Tokens("", []), Tokens("", [2])):
            outbox.put_nowait(message)
        assert client.got == [Tokens("a", [1]), Tokens("", [2])]
        outbox.put_nowait(FINISHED)
        outbox.put_nowait(Failed("draining", ""))
        outbox.put_nowait(Tokens("b", [3]))
        assert await outbox.end() == FINISHED == outbox.final
        assert len(client.got) == 2

    with_outbox(main)


def test_a_client_that_reads_nothing_ends_its_request_with_a_reply_for_when_it_reads_again() -> None:
    async def main(client: Client, outbox: ClientOutbox) -> None:
        outbox.put_nowait(Tokens("a", [1]))
        client.error = ReadsNothing("1000 replies wait")
        outbox.put_nowait(Tokens("b", [2]))
        outbox.put_nowait(FINISHED)
        assert await outbox.end() == outbox.final == Failed("too_slow", "1000 replies wait")
        assert client.got == [Tokens("a", [1])]

    with_outbox(main)


def test_a_client_that_is_gone_ends_the_wait_and_the_answer_is_over_all_the_same() -> None:
    async def main(client: Client, outbox: ClientOutbox) -> None:
        wait = asyncio.create_task(outbox.end())
        await asyncio.sleep(0)
        client.error = PeerDied("the client is gone")
        outbox.put_nowait(Tokens("a", [1]))
        outbox.put_nowait(FINISHED)
        with pytest.raises(PeerDied):
            await wait
        assert outbox.final == FINISHED and not client.got

    with_outbox(main)


def test_a_silent_request_notices_that_its_client_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the empty replies that it sends now and then."""
    monkeypatch.setattr("scheduler.ticket.KEEPALIVE_S", 0.01)

    async def main(client: Client, outbox: ClientOutbox) -> None:
        wait = asyncio.create_task(outbox.end())
        while len(client.got) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert all(tokens == Tokens("", []) for tokens in client.got)
        client.error = PeerDied("the client is gone")
        with pytest.raises(PeerDied):
            await asyncio.wait_for(wait, 20)

    with_outbox(main)
