"""More HTTP requests at once than the engine has places for, against its own count of what it was asked."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.http.rig import Connection, HttpRig, serving
from tests.scheduler.rig import on_loop

PLACES = 3
ENGINE = {"max_running_requests": 2, "max_queued_requests": PLACES - 2}
ASKED: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], **ASKED}


async def statuses(rig: HttpRig, count: int, path: str, **body: Any) -> list[int]:
    """Of so many at once, in order."""
    replies = await asyncio.gather(*(rig.post(path, **body) for _ in range(count)))
    for reply in replies:
        if reply.status_code == 429:
            assert reply.json()["error"]["code"] == "queue_full" and reply.headers["retry-after"] == "1"
            assert reply.headers.get("connection") != "close"
    return [reply.status_code for reply in replies]


@pytest.mark.parametrize("event_loop", ["selector", "uvloop"])
def test_what_has_no_place_is_refused_before_the_engine_is_asked(model: Path, event_loop: str) -> None:
    if event_loop == "uvloop":
        pytest.importorskip("uvloop")

    async def main() -> None:
        async with serving(model, engine=ENGINE) as rig:
            rig.engine.worker.step_s = 0.02
            for path, body in (("/v1/completions", {"prompt": "a", **ASKED}), ("/v1/chat/completions", CHAT)):
                asked = await statuses(rig, 12, path, **body)
                assert sorted(asked) == [200] * PLACES + [429] * 9
                await rig.at_rest()
                assert not rig.front.full and not rig.front._coming
            assert await statuses(rig, 2, "/tokenize", prompt="a") == [200, 200]
            async with rig.engine.client() as client:
                stats = await client.stats()
            assert (stats.finished, stats.refused) == (2 * PLACES, 0)
            assert 'http_requests_refused_total{model_name="made-up"} 18.0' in (await rig.http.get("/metrics")).text

    on_loop(event_loop, main)


@pytest.mark.parametrize("several", [{"prompt": "a", "n": 3}, {"prompt": ["a", "b"]}])
def test_each_choice_takes_a_place(model: Path, several: dict[str, Any]) -> None:
    """The first has too few left for the others, which are as large: the engine hears of none of them."""

    async def main() -> None:
        async with serving(model, engine=ENGINE) as rig:
            rig.engine.worker.step_s = 0.02
            asked = await statuses(rig, 6, "/v1/completions", **ASKED | {"max_tokens": 40}, **several)
            assert sorted(asked) == [200] + [429] * 5
            await rig.at_rest()
            async with rig.engine.client() as client:
                assert (await client.stats()).refused == 0

    on_loop("selector", main)


def test_choices_that_have_not_begun_have_the_next_refused_before_it_is_decoded(model: Path) -> None:
    async def main() -> None:
        async with serving(model, engine=ENGINE) as rig:
            rig.engine.worker.step_s = 0.3
            first = asyncio.create_task(statuses(rig, 1, "/v1/completions", prompt="a", n=PLACES, **ASKED))
            async with asyncio.timeout(20):
                while not rig.front._answering:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            assert rig.front.full
            reply = await rig.post(prompt=[{}], **ASKED)  # 400 if it was decoded
            assert reply.status_code == 429 and f"{PLACES} answers may run" in reply.text
            assert await first == [200]

    on_loop("selector", main)


def test_who_reads_slowly_takes_no_place_once_the_engine_is_done(model: Path) -> None:
    """All places' answers, of which nothing is read, longer than what the system holds of them for a client."""

    async def main() -> None:
        async with serving(model, engine=ENGINE) as rig:
            assert await statuses(rig, 1, "/v1/completions", prompt="a", **ASKED) == [200]
            body = {"prompt": "a", **ASKED, "max_tokens": 3000, "stream": True, "logprobs": 20}
            slow = [Connection(rig.port, receive_nbytes=1) for _ in range(PLACES)]
            for connection in slow:
                await connection.post(**body)
            async with asyncio.timeout(30):
                while (await rig.front.client.stats()).finished < 1 + PLACES:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert len(rig.front._answering) == PLACES, "they are still being sent"
            assert await statuses(rig, PLACES, "/v1/completions", prompt="a", **ASKED) == [200] * PLACES
            for connection in slow:
                connection.close(hard=True)

    on_loop("selector", main)
