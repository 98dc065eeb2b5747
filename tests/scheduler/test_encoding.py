"""Encoding in threads: what a text that takes too long costs, itself and others."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from copyengine.wire.errors import PeerDied, RequestRefused
from copyengine.wire.loop import run
from scheduler import encoding
from scheduler.encoding import Encoder


class Stuck:
    """Encodes nothing until it is let go of."""

    def __init__(self) -> None:
        self.begun = 0
        self.goes_on = threading.Event()

    def __call__(self) -> list[int]:
        self.begun += 1
        assert self.goes_on.wait(20)
        return [1]


def with_encoder(main: Callable[[Encoder, Stuck], Coroutine[Any, Any, None]]) -> None:
    stuck = Stuck()

    async def test() -> None:
        encoder = Encoder()
        try:
            await asyncio.wait_for(main(encoder, stuck), 10)
        finally:
            encoder.close()

    try:
        run(test(), "selector")
    finally:
        stuck.goes_on.set()


def nobody() -> None:
    """Whom nothing need be told."""


async def refused(encoder: Encoder, encode: Callable[[], list[int]]) -> str:
    with pytest.raises(RequestRefused) as error:
        await encoder.run(encode, nobody)
    assert error.value.code == "encode_timeout"
    return error.value.detail


def test_what_encoding_returns_or_raises_is_the_callers() -> None:
    def fail() -> list[int]:
        raise RequestRefused("invalid_request", "no text")

    async def main(encoder: Encoder, _: Stuck) -> None:
        assert await encoder.run(lambda: [3, 4], nobody) == [3, 4]
        with pytest.raises(RequestRefused, match="no text"):
            await encoder.run(fail, nobody)

    with_encoder(main)


def test_a_text_that_takes_too_long_is_refused_and_the_next_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "ENCODE_S", 0.05)

    async def main(encoder: Encoder, stuck: Stuck) -> None:
        detail = await refused(encoder, stuck)
        assert detail.startswith("the text was no tokens after 0.05 s: the tokenizer is still at it")
        assert await encoder.run(lambda: [3], nobody) == [3]

    with_encoder(main)


def test_no_more_threads_are_stuck_than_there_may_be_and_they_serve_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that was refused before its turn is never encoded."""
    monkeypatch.setattr(encoding, "ENCODE_S", 0.05)
    monkeypatch.setattr(encoding, "ENCODE_THREADS", 2)
    before = threading.active_count()

    async def main(encoder: Encoder, stuck: Stuck) -> None:
        details = await asyncio.gather(*(refused(encoder, stuck) for _ in range(5)))
        assert sum("other texts held all 2 threads" in detail for detail in details) == 3
        assert stuck.begun == 2 and threading.active_count() <= before + 2
        stuck.goes_on.set()
        monkeypatch.setattr(encoding, "ENCODE_S", 5.0)
        assert await encoder.run(lambda: [3], nobody) == [3]
        assert stuck.begun == 2

    with_encoder(main)


def test_whoever_waits_is_asked_now_and_then_and_may_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.timed_threads.KEEPALIVE_S", 0.01)
    asked = list[int]()

    def leaves() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise PeerDied("the client is gone")

    async def main(encoder: Encoder, stuck: Stuck) -> None:
        with pytest.raises(PeerDied):
            await encoder.run(stuck, leaves)
        assert len(asked) == 3

    with_encoder(main)
