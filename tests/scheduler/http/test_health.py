"""/health against what really becomes of a request at the same time."""

import asyncio
from pathlib import Path
from typing import Any

from scheduler.client import Client
from scheduler.http import engine_state
from scheduler.protocol import HealthReply
from tests.scheduler.http.rig import HttpRig, serving
from tests.scheduler.rig import on_loop


async def ready(rig: HttpRig) -> dict[str, Any]:
    """What /health/ready says, once it is sure that a request gets on as it says."""
    health = await rig.http.get("/health/ready")
    answer = await rig.post(prompt=[5], max_tokens=1)
    assert (health.status_code, answer.status_code) in ((200, 200), (503, 503))
    assert (health.status_code == 200) == health.json()["ready"] == ("retry-after" not in health.headers)
    assert (await rig.http.get("/health")).json() == health.json()
    assert (await rig.http.get("/health/live")).status_code == 200
    found: dict[str, Any] = health.json()
    return found


def test_it_serves_loses_its_worker_and_drains(model: Path) -> None:
    async def main() -> None:
        async with serving(model, engine={"restarts": True}) as rig:
            assert await ready(rig) == {
                "ready": True,
                "phase": "ready",
                "model": "made-up",
                "loading": "",
                "done_nbytes": 0,
                "total_nbytes": 0,
                "detail": "",
            }
            await rig.engine.worker.die()
            await rig.engine.lost(0)
            rig.front.engine._fresh = None  # a second later
            assert (await ready(rig))["phase"] == "restarting"

    on_loop("selector", main)


def test_how_far_a_load_is_and_no_paths(model: Path) -> None:
    async def main() -> None:
        async with serving(model) as rig:

            async def health(deadline_s: float) -> HealthReply:
                detail = "cannot read /srv/models/secret/model.safetensors: gone"
                return HealthReply(False, "restarting", "m", 0, 0, "expert banks", 5, 10, detail)

            rig.front.engine = engine_state.EngineState(health)
            found = await ready(rig)
            assert (found["loading"], found["done_nbytes"], found["total_nbytes"]) == ("expert banks", 5, 10)
            assert found["detail"] == "cannot read (a file): gone"

    on_loop("selector", main)


def test_a_scheduler_that_is_not_there(model: Path) -> None:
    """Within a second or so, again and again."""

    async def main() -> None:
        async with serving(model) as rig, Client("tcp://127.0.0.1:9") as nobody:
            rig.front.engine = engine_state.EngineState(nobody.health)
            start_s = asyncio.get_running_loop().time()
            assert (await ready(rig))["phase"] == "unreachable"
            assert asyncio.get_running_loop().time() - start_s < 20

    on_loop("selector", main)
