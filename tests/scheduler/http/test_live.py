"""The live page: its data against what the engine says, its files against what a browser would do with them."""

import asyncio
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
import pytest

from copyengine.wire.errors import PeerDied
from scheduler.http.live import SHARED_S, Live, LiveFigures, page_files
from scheduler.http.metrics import Metrics
from scheduler.protocol import ActivityReply, HealthReply, RunningRequest, Sampling, StatsReply
from tests.scheduler.http.rig import MODEL, serving
from tests.scheduler.http.test_metrics import Clock, families, nothing, value
from tests.scheduler.rig import on_loop
from tests.test_layers import ROOT

KEY = b"very secret"


class MadeUpEngine:
    """Stands for a Client: says the same at once, or raises it, and counts how often it was asked."""

    def __init__(self, health: HealthReply | Exception, requests: list[RunningRequest] | None = None) -> None:
        self.asked = 0
        self._health = health
        self._requests = requests or []

    async def health(self) -> HealthReply:
        self.asked += 1
        await asyncio.sleep(0)
        if isinstance(self._health, Exception):
            raise self._health
        return self._health

    async def stats(self) -> StatsReply:
        if isinstance(self._health, Exception):
            raise self._health
        return StatsReply(**nothing())

    async def activity(self) -> ActivityReply:
        return ActivityReply(self._requests, [])


def live(made_up: MadeUpEngine, clock: Clock) -> Live:
    return Live(made_up, Metrics("m", clock), "m", clock)  # type: ignore[arg-type]


def figures(body: bytes) -> LiveFigures:
    return msgspec.json.decode(body, type=LiveFigures)


def test_many_who_look_cost_one_look() -> None:
    async def main() -> None:
        clock, made_up = Clock(), MadeUpEngine(HealthReply(True, "ready", "m"))
        page = live(made_up, clock)
        assert made_up.asked == 0, "nobody looks"
        assert len({*await asyncio.gather(*(page.json() for _ in range(20)))}) == 1
        assert made_up.asked == 1
        clock.now_s += 2 * SHARED_S
        assert figures(await page.json()).at_s == clock.now_s
        assert made_up.asked == 2

    on_loop("selector", main)


def test_an_engine_that_is_away_is_said_to_be_away_and_no_file_of_this_machine_is_named() -> None:
    async def main() -> None:
        clock = Clock()
        gone = figures(await live(MadeUpEngine(PeerDied("gone")), clock).json())
        assert (gone.phase, gone.model, gone.stats) == ("away", "m", None)
        loading = HealthReply(False, "loading", "m", loading="experts", done_nbytes=3, total_nbytes=9)
        seen = figures(await live(MadeUpEngine(loading), clock).json())
        assert (seen.phase, seen.loading, seen.done_nbytes, seen.total_nbytes) == ("loading", "experts", 3, 9)
        dead = HealthReply(False, "dead", "m", detail="worker0: no such file: /home/me/model/a.safetensors")
        seen = figures(await live(MadeUpEngine(dead), clock).json())
        assert seen.phase == "dead" and "worker0" in seen.detail and "/home" not in seen.detail

    on_loop("selector", main)


def test_it_shows_what_the_engine_does_and_what_the_front_has_seen(model: Path) -> None:
    async def main() -> None:
        async with serving(model) as rig, rig.engine.client() as client:
            assert (await rig.post(prompt=[5, 6, 7], max_tokens=3)).status_code == 200
            rig.engine.worker.gate.clear()
            evil = "<img src=x onerror=alert(1)>"
            asking = asyncio.create_task(
                client.generate(token_ids=[5] * 9, sampling=Sampling(max_tokens=2), request_id=evil).text()
            )
            await rig.engine.settled(running=1)
            seen = figures((await rig.http.get("/live")).content)
            assert (seen.phase, seen.model) == ("ready", MODEL)
            assert seen.stats and seen.stats == await client.stats()
            assert seen.activity
            assert [(r.request_id, r.phase, r.prompt_tokens) for r in seen.activity.requests] == [(evil, "prefill", 9)]
            assert sum(seen.ttft.counts) == 1 and len(seen.ttft.counts) == len(seen.ttft.bounds) + 1
            text = (await rig.http.get("/metrics")).content
            assert value(families(text), "request_success", finished_reason="length") == 1
            assert value(families(text), "num_requests_running") == 1
            rig.engine.worker.gate.set()
            await asking

    on_loop("selector", main)


def test_with_a_key_the_page_is_there_without_it_and_its_figures_are_not(model: Path) -> None:
    async def main() -> None:
        async with serving(model, KEY) as rig:
            page = await rig.http.get("/")
            assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
            assert MODEL not in page.text
            for name in page_files():
                assert (await rig.http.get(f"/page/{name}")).status_code == 200
            for path in ("/live", "/metrics"):
                assert (await rig.http.get(path)).status_code == 401
                allowed = await rig.http.get(path, headers={"authorization": f"Bearer {KEY.decode()}"})
                assert allowed.status_code == 200
            for name in ("nothing", "../live.py", "..%2flive.py", "../../http/live.py"):
                assert (await rig.http.get(f"/page/{name}")).status_code == 404

    on_loop("selector", main)


def test_a_policy_keeps_everything_out_that_is_not_served_here() -> None:
    """Each directive that could let something in names this origin or nothing."""
    headers = page_files()["live.html"].response().headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert set(policy.values()) == {"'self'", "'none'"} and policy["default-src"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


NAMESPACES = ("http://www.w3.org/2000/svg",)


@pytest.mark.parametrize("name", sorted(page_files()))
def test_a_file_of_the_page_fetches_from_here_and_makes_no_markup_of_what_it_shows(name: str) -> None:
    """Against what the policy would block only once it is too late to see it, and what it would not block."""
    text = page_files()[name].body.decode()
    assert [url for url in re.findall(r"\w+://[^\s\"')]*", text) if url not in NAMESPACES] == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.search(r"\son\w+=|\sstyle=|javascript:|@import|url\(", text), "inline, or fetched from elsewhere"
    if name.endswith(".html"):
        assert re.findall(r"<script[^>]*>(.*?)</script>", text) == [""] and "<style" not in text


def test_every_file_that_the_page_names_is_there() -> None:
    found = page_files()
    html = found["live.html"].body.decode()
    named = set(re.findall(r'(?:src|href)="page/([^"]*)"', html))
    for name, file in found.items():
        if name.endswith(".js"):
            named |= set(re.findall(r'from "\./([^"]*)"', file.body.decode()))
    assert named | {"live.html"} == set(found)


def test_every_element_that_the_scripts_look_for_is_there() -> None:
    html = page_files()["live.html"].body.decode()
    looked_for = set(re.findall(r'(?:\$|setText|showHits)\("([\w-]+)"', page_files()["live.js"].body.decode()))
    ids = re.findall(r'\sid="([\w-]+)"', html)
    assert len(looked_for) > 20 and looked_for <= set(ids) and len(ids) == len(set(ids))


def test_an_installed_package_has_the_pages_files() -> None:
    """Each of them matches what pyproject.toml has setuptools take along."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["scheduler.http"]
    directory = ROOT / "scheduler" / "http"
    files = [path.relative_to(directory).as_posix() for path in (directory / "page").iterdir()]
    assert {Path(name).name for name in files} == set(page_files())
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in files)
