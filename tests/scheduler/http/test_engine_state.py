"""When the engine is asked how it is, and what is made of it, by a made-up engine and clock."""

import asyncio
from typing import Any

import pytest

from copyengine.wire.errors import PeerDied, PeerTimeout
from scheduler.http import engine_state
from scheduler.http.engine_state import FRESH_S, EngineState
from scheduler.http.errors import ApiError
from scheduler.protocol import HealthReply
from tests.scheduler.rig import on_loop

READY = HealthReply(True, "ready", "m", 4096, 400)


class Engine:
    """Answers with `replies`, the last one again and again."""

    def __init__(self, *replies: HealthReply | Exception) -> None:
        self.replies = list(replies)
        self.asked = 0
        self.now_s = 100.0
        self.state = EngineState(self.health, lambda: self.now_s)

    async def health(self, deadline_s: float) -> HealthReply:
        self.asked += 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


async def refused(engine: Engine) -> tuple[Any, ...]:
    with pytest.raises(ApiError) as error:
        await engine.state.serving()
    body = error.value.body.error
    assert error.value.status == 503 and body.type == "service_unavailable" and "retry-after" in error.value.headers
    return body.code, body.message


def test_that_it_serves_is_known_for_a_while() -> None:
    engine = Engine(READY)

    async def main() -> None:
        for _ in range(3):
            assert await engine.state.serving() == READY
        assert engine.asked == 1
        engine.now_s += FRESH_S
        assert await engine.state.serving() == READY and engine.asked == 2

    on_loop("selector", main)


def test_that_it_does_not_serve_is_asked_each_time() -> None:
    loading = HealthReply(False, "loading", "m", loading="expert banks", done_nbytes=10**8, total_nbytes=2 * 10**9)
    engine = Engine(
        loading,
        HealthReply(False, "restarting", "m", detail="worker0 died in /home/x"),
        HealthReply(False, "draining", "m"),
        HealthReply(False, "dead", "m", detail="/home/x"),
        PeerDied("tcp://127.0.0.1:1 is gone"),
        READY,
    )

    async def main() -> None:
        text = "the model is still loading: expert banks, 100 of 2,000 MB"
        assert await refused(engine) == ("not_ready", text)
        assert await refused(engine) == ("not_ready", "a worker is started anew")
        assert (await refused(engine))[0] == "draining"
        assert await refused(engine) == ("dead", "no worker lives")
        assert (await refused(engine))[0] == "engine_silent"
        assert await engine.state.serving() == READY

    on_loop("selector", main)


def test_one_that_hangs_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_state, "HEALTH_S", 0.05)
    monkeypatch.setattr(engine_state, "SERVING_S", 0.1)

    async def hang(deadline_s: float) -> HealthReply:
        await asyncio.sleep(60)
        return READY

    async def main() -> None:
        state = EngineState(hang)
        with pytest.raises(PeerTimeout):
            await state.ask()
        with pytest.raises(ApiError, match="503 engine_silent"):
            await state.serving()
        assert await state.max_model_len() == 0

    on_loop("selector", main)


def test_how_long_a_request_may_be_is_known_from_the_first_time_on() -> None:
    engine = Engine(HealthReply(False, "loading", "m"), READY, PeerDied("gone"))

    async def main() -> None:
        assert await engine.state.max_model_len() == 0
        assert await engine.state.max_model_len() == 4096
        assert await engine.state.max_model_len() == 4096 and engine.asked == 2

    on_loop("selector", main)


def test_one_that_is_late_serves_and_is_not_ready_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """All who ask wait for one answer, requests longer than who asks whether it is ready."""
    monkeypatch.setattr(engine_state, "HEALTH_S", 0.05)
    asked, may_answer = 0, asyncio.Event()

    async def late(deadline_s: float) -> HealthReply:
        nonlocal asked
        asked += 1
        await may_answer.wait()
        return READY

    async def main() -> None:
        state = EngineState(late)
        requests = [asyncio.create_task(state.serving()) for _ in range(20)]
        with pytest.raises(PeerTimeout):
            await state.ask()
        assert not any(request.done() for request in requests)
        may_answer.set()
        assert await asyncio.gather(*requests) == [READY] * 20 and asked == 1

    on_loop("selector", main)


def test_who_leaves_takes_the_answer_from_nobody() -> None:
    """One of two who wait is cancelled, as when its client leaves; and a failure is told to both of two."""
    engine = Engine(READY, PeerDied("gone"))

    async def main() -> None:
        first, second = (asyncio.create_task(engine.state.serving()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == READY and engine.asked == 1
        engine.now_s += FRESH_S
        told = await asyncio.gather(*(engine.state.serving() for _ in range(2)), return_exceptions=True)
        assert all(isinstance(one, ApiError) for one in told) and engine.asked == 2

    on_loop("selector", main)
