"""The live page in headless Chromium, over a real engine under load: what a person would see, and what they would not.

`python -m pytest -m browser tests/e2e/test_live_page.py` needs the extra `browser`, Chromium and its driver. It leaves
screenshots in `--basetemp`, if that is given.
"""

import base64
import contextlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.engine import RESTART_TIMEOUT_S, Engine, running

webdriver: Any = pytest.importorskip("selenium.webdriver")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
DRIVER = shutil.which("chromedriver") or ""
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium or its driver is not installed"),
]

KEY = "let-me-in"
BEARER = {"authorization": f"Bearer {KEY}"}
SLOTS, LAYERS, EXPERTS = 128, 8, 64
FLAGS = ("--slots", f"{SLOTS}", "--demand-tokens", "64", "--chunked-prefill-size", "256", "--max-running-requests", "4")
EVIL = "<img src=x onerror=document.title=1>"
PHONE, DESK = (360, 740), (1200, 900)
PATIENCE_S = 30.0
MAP_COPY = """
    const canvas = document.querySelector("canvas");
    const map = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    map.drawImage(canvas, 0, 0);
"""
"""The first heat map's pixels, in JavaScript."""


class Page:
    """The page in one browser."""

    def __init__(self, driver: Any, base: str) -> None:
        self.driver = driver
        self.base = base

    def run(self, script: str) -> Any:
        """What the JavaScript returns."""
        return self.driver.execute_script(script)

    def text(self, element_id: str) -> str:
        """What is written there, whether or not it is visible."""
        return str(self.run(f"return document.getElementById('{element_id}').textContent"))

    def shown(self, element_id: str) -> bool:
        return bool(self.run(f"return document.getElementById('{element_id}').checkVisibility()"))

    def look_like(self, size: tuple[int, int], scheme: str) -> None:
        """A screen of that size that prefers `scheme`."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def wait_for(self, met: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
        """Until that is so; AssertionError with the page's text if it does not become so."""
        end_s = time.monotonic() + patience_s
        while not met():
            assert time.monotonic() < end_s, self.run("return document.body.innerText")
            time.sleep(0.1)

    def fetched(self) -> list[str]:
        """Addresses of all that the page asked for since it was opened, and of the page."""
        entries = "return [location.href, ...performance.getEntriesByType('resource').map((entry) => entry.name)]"
        return list(self.run(entries))

    def looks(self) -> int:
        """How often it has asked for figures."""
        return sum(url == f"{self.base}/live" for url in self.fetched())

    def colours(self) -> int:
        """How many colours the first heat map has."""
        return int(
            self.run(
                f"{MAP_COPY} const {{ data }} = map.getImageData(0, 0, canvas.width, canvas.height);"
                "return new Set(new Uint32Array(data.buffer)).size"
            )
        )

    def background(self) -> str:
        return str(self.run("return getComputedStyle(document.body).backgroundColor"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(*FLAGS, "--http-port", "0", "--api-key", KEY) as engine:
        yield engine


@pytest.fixture
def page(engine: Engine, tmp_path: Path) -> Iterator[Page]:
    """A browser that has opened the page; at the end it must not have complained of anything."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking")
    for flag in (*flags, "no-first-run", "disable-component-update", f"user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        opened = Page(driver, engine.fact("HTTP").removesuffix("/v1"))
        opened.look_like(DESK, "light")
        driver.get(f"{opened.base}/")
        yield opened
        complaints = [entry["message"] for entry in driver.get_log("browser")]
        assert [text for text in complaints if "401" not in text] == []
        asked_for = requested(driver)
        assert f"{opened.base}/live" in asked_for
        assert {url for url in [*asked_for, *opened.fetched()] if not url.startswith(f"{opened.base}/")} == set()
    finally:
        driver.quit()


def requested(driver: Any) -> list[str]:
    """What the browser has asked any host for, by its own log; it begins with an empty page of its own."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if url.partition(":")[0] not in ("data", "chrome", "about")]


def unlock(page: Page) -> None:
    """Bring the key, as a person would."""
    page.wait_for(lambda: page.shown("key-form"))
    field = page.driver.find_element("id", "key")
    field.send_keys(KEY)
    field.submit()
    page.wait_for(lambda: page.text("state") == "ready" and page.shown("figures"))


@contextlib.contextmanager
def load(base: str, clients: int = 6) -> Iterator[None]:
    """So many clients that ask again and again, with prompts that stream and ones that do not."""
    over = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(headers=BEARER, timeout=60) as client:
            for turn in range(10_000):
                tokens = [5 + (7 * i + 3 * number + turn) % 900 for i in range(400 if number == 0 else 20)]
                body = {"prompt": tokens, "max_tokens": 48, "ignore_eos": True, "temperature": 1}
                client.post(f"{base}/v1/completions", json=body).raise_for_status()
                if over.is_set():
                    return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def test_it_shows_an_engine_at_work(engine: Engine, page: Page, tmp_path: Path) -> None:
    unlock(page)
    assert page.text("requests-more") == "None at the moment." and page.run("return document.images.length") == 0
    resident = f"return +document.querySelector('canvas').ariaLabel.match(/([\\d,]+) of {LAYERS * EXPERTS}/)[1]"
    with load(page.base):
        page.wait_for(lambda: page.run(resident) == SLOTS)
        page.wait_for(lambda: page.colours() >= 3)
        rows = "return [...document.querySelectorAll('#request-rows tr')].map((row) => row.innerText)"
        page.wait_for(lambda: {"decode", "waits"} <= set(re.findall(r"decode|waits|prefill", str(page.run(rows)))))
        page.wait_for(lambda: len(re.findall(r"[1-9][\d.]* [kM]B/s", page.text("link-legend"))) >= 2)
        page.wait_for(lambda: page.run("return document.querySelectorAll('#link-chart polygon').length") == 3)
        page.wait_for(lambda: "median" in page.text("ttft-text"))
        page.wait_for(lambda: re.fullmatch(r"[\d.]+ %", page.text("hits")))
        time.sleep(12)
        page.driver.save_screenshot(str(tmp_path / "light.png"))
        colours = {page.background()}
        for size, scheme in [(DESK, "dark"), (PHONE, "light"), (PHONE, "dark")]:
            page.look_like(size, scheme)
            time.sleep(1.5)  # until it has drawn everything anew
            assert page.run("return innerWidth") == size[0]
            assert page.run("return document.documentElement.scrollWidth <= innerWidth"), size
            page.driver.save_screenshot(str(tmp_path / f"{scheme}_{size[0]}.png"))
            colours.add(page.background())
        assert len(colours) == 2
    page.wait_for(lambda: page.shown("requests-more") and not page.run(rows))
    page.wait_for(lambda: page.text("running") == "0")


def test_the_heat_map_is_the_residency_bit_by_bit(page: Page) -> None:
    """Against the bitmap that /live answers, while nothing changes it."""
    unlock(page)
    complete(page.base, 30, 8)
    held = residency(page.base)
    assert sum(map(sum, held)) == SLOTS
    page.run("document.querySelector('details').open = true")
    cells = (
        f"{MAP_COPY} const [across, down] = [canvas.width / {EXPERTS}, canvas.height / {LAYERS}];"
        "const at = (layer, expert) =>"
        "  map.getImageData(expert * across + across / 2, layer * down + down / 2, 1, 1).data.join();"
        "const absent = getComputedStyle(document.querySelector('.swatch.absent')).backgroundColor;"
        f"return Array.from({{ length: {LAYERS} }}, (_, layer) => Array.from({{ length: {EXPERTS} }},"
        "  (_, expert) => `rgb(${at(layer, expert).split(',').slice(0, 3).join(', ')})` === absent ? 0 : 1))"
    )
    page.wait_for(lambda: page.run(cells) == held)
    told = page.run("return [...document.querySelectorAll('.layers tbody tr')].map((row) => row.cells[1].textContent)")
    assert told == [f"{sum(row)} of {EXPERTS}" for row in held]


def complete(base: str, prompt_tokens: int, max_tokens: int) -> None:
    body = {"prompt": [5 + i for i in range(prompt_tokens)], "max_tokens": max_tokens, "ignore_eos": True}
    httpx.post(f"{base}/v1/completions", json=body, headers=BEARER, timeout=60).raise_for_status()


def residency(base: str) -> list[list[int]]:
    """[L][E] of 0 and 1, of the one worker; lowest bit first, as the protocol has it."""
    (worker,) = httpx.get(f"{base}/live", headers=BEARER).json()["activity"]["residency"]
    packed = base64.b64decode(worker["resident"])
    rows = [packed[at : at + EXPERTS // 8] for at in range(0, len(packed), EXPERTS // 8)]
    return [[row[i // 8] >> i % 8 & 1 for i in range(EXPERTS)] for row in rows]


def test_rates_are_differences_and_what_begins_anew_leaves_a_gap(page: Page) -> None:
    """The page's own arithmetic, by hand."""
    script = """
        const { History } = await import("./page/history.js");
        const { bytes, digits, percent, seconds } = await import("./page/numbers.js");
        const { quantile } = await import("./page/charts.js");
        const mode = (copied_nbytes) => ({ copied_nbytes, lookups: copied_nbytes, hits: 0 });
        const modes = (a, b) => ({ decode: mode(a), demand: mode(b), streamed: mode(0) });
        const stats = (tokens, a, b) => ({ generated_tokens: tokens, ...modes(a, b) });
        const past = new History();
        past.add(100, stats(0, 0, 0));
        past.add(102, stats(50, 4000, 600));
        past.add(102, stats(50, 4000, 600));
        past.add(103, stats(60, 4000, 700));
        const rate = past.rate((one) => one.generated_tokens);
        past.add(104, stats(3, 10, 0));
        past.add(106, stats(5, 30, 0));
        const drawn = past.samples.map(({ at, rates }) => [at, rates && rates.decode, rates && rates.demand]);
        past.add(300, stats(9, 90, 0));
        const words = [bytes(0), bytes(1234567), digits(0.1234), percent(1, 0), percent(1, 8)];
        words.push(seconds(9.96), seconds(4000));
        const spread = [quantile([1, 2], [1, 2, 1], 0.5), quantile([1, 2], [0, 0, 3], 0.5), quantile([1], [0, 0], 0.5)];
        return [rate, drawn, past.samples, words, spread];
    """
    rate, drawn, left, words, spread = page.run(f"return (async () => {{ {script} }})()")
    assert rate == 20
    assert drawn == [[102, 2000, 300], [103, 0, 100], [104, None, None], [106, 10, 0]]
    assert left == [{"at": 300, "rates": None}], "what is older than the chart shows is gone"
    assert words == ["0 B", "1.23 MB", "0.123", "\N{EN DASH}", "12.5 %", "10.0 s", "1 h 6 min"]
    assert spread == ["≤ 2 s", "> 2 s", ""]


def test_what_clients_call_their_requests_is_text(engine: Engine, page: Page) -> None:
    unlock(page)

    def ask() -> None:
        async def session(client: Any) -> None:
            from scheduler.protocol import Sampling

            sampling = Sampling(max_tokens=1500, ignore_eos=True)
            async for _ in client.generate(token_ids=[5, 6], sampling=sampling, request_id=EVIL):
                if seen.is_set():
                    return

        engine.over(session)

    seen = threading.Event()
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        page.wait_for(lambda: EVIL in str(page.run("return document.getElementById('request-rows').innerText")))
        assert page.run("return document.images.length") == 0
        assert page.run("return document.title") != "1"
    finally:
        seen.set()
        asking.join(60)


def test_a_wrong_key_is_told_and_a_right_one_shows_the_figures(page: Page) -> None:
    page.wait_for(lambda: page.shown("key-form"))
    assert not page.shown("figures") and page.text("model") == ""
    page.driver.find_element("id", "key").send_keys("guessed")
    page.driver.find_element("css selector", "#key-form button").click()
    page.wait_for(lambda: "does not take this key" in page.text("notice"))
    unlock(page)
    assert page.text("notice") == ""
    page.driver.refresh()
    page.wait_for(lambda: page.shown("figures"))


def test_an_engine_that_is_away_is_said_to_be_and_comes_back_without_a_reload(engine: Engine, page: Page) -> None:
    unlock(page)
    scheduler = engine.child("scheduler")
    scheduler.suspend()
    try:
        page.wait_for(lambda: page.text("state") == "away" and "goes on asking" in page.text("notice"))
        assert page.shown("figures"), "what was last known"
    finally:
        scheduler.resume()
    page.wait_for(lambda: page.text("state") == "ready" and not page.shown("notice"))
    engine.child("worker0").kill()
    page.wait_for(lambda: page.text("state") != "ready" and page.shown("notice"))
    page.wait_for(lambda: page.text("state") == "ready" and page.text("restarts") == "1", RESTART_TIMEOUT_S)
    scheduler.kill()
    page.wait_for(lambda: page.text("rate-more") == "0 in all" and page.text("state") == "ready", RESTART_TIMEOUT_S)


def test_a_page_that_nobody_sees_asks_nothing(page: Page) -> None:
    unlock(page)
    seen = page.looks()
    page.wait_for(lambda: page.looks() > seen)
    hide = "Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }});"  # headless, all is visible
    tell = "document.dispatchEvent(new Event('visibilitychange'));"
    page.run(hide.format("false") + tell + hide.format("true") + tell)  # with a look under way
    time.sleep(1)
    before = page.looks()
    time.sleep(3)
    assert page.looks() == before
    page.run(hide.format("false") + tell)
    page.wait_for(lambda: page.looks() > before)
