"""The engine on GPUs, seen from outside: against its own run on the CPU, against itself at other thresholds, and
against what was free before it was started."""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

from copyengine.checkpoint.quantise import main as quantise
from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.wire.watchdog import ASK_S
from scheduler.client import Client
from scheduler.last_known import FRESH_S
from scheduler.protocol import Sampling
from tests.bench.flash_next import write_flash_next
from tests.bench.report import gpu_nbytes
from tests.e2e.engine import CUDA_START_TIMEOUT_S, Engine, gone, running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = ("--device", "cuda")
PROMPT_TOKENS = 600
NEW_TOKENS = 24
SIZES = Sizes(
    layers=3, hidden=256, intermediate=128, experts=32, experts_per_token=4, heads=4, kv_heads=2, vocab_size=512
)
SLACK_NBYTES = 64 << 20
"""What a driver may keep for itself between two runs."""


def greedy(engine: Engine, prompts: Sequence[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """The answers to `prompts`, all asked at once."""

    async def ask() -> list[list[int]]:
        async with Client(engine.endpoint) as client:

            async def one(prompt: list[int]) -> list[int]:
                sampling = Sampling(max_tokens=new_tokens, ignore_eos=True)
                answer = client.generate(token_ids=prompt, sampling=sampling)
                return [token async for piece in answer for token in piece.token_ids]

            return await asyncio.gather(*map(one, prompts))

    return asyncio.run(ask())


def prompts(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def free_nbytes() -> list[int]:
    """Of each GPU's memory."""
    told = gpu_nbytes("memory.free")
    assert told, "nvidia-smi tells nothing"
    return told


def all_free_again(before: Sequence[int], within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if all(now >= then - SLACK_NBYTES for now, then in zip(free_nbytes(), before, strict=True)):
            return True
        time.sleep(0.3)
    return False


@pytest.fixture(scope="module")
def flash_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in Flash-Next's geometry; weights are made up."""
    directory = tmp_path_factory.mktemp("flash_next")
    write_flash_next(directory, layers=2, vocab_size=4096)
    return directory


@pytest.mark.parametrize("copy_engine", ["process", "thread"])
def test_greedy_text_is_the_cpus(copy_engine: str) -> None:
    """The built-in model in float32, several requests at once, prefill on demand and streamed, decode by graphs."""
    asked = prompts(300, (5, 40, 90))
    flags = ("--dtype", "float32", "--demand-tokens", "64", "--slots", "128")
    with running(*flags) as engine:
        expected = greedy(engine, asked)
    with running(*CUDA, *flags, "--copy-engine", copy_engine) as engine:
        assert greedy(engine, asked) == expected
        assert greedy(engine, asked) == expected
        assert f"copied by a {copy_engine}" in engine.text() and "cuda:0" in engine.text()


def test_memory_placements_do_not_change_the_text(flash_next: Path) -> None:
    """Token embedding and KV pages in host memory, one and both; all of it is given back."""
    asked, ram = prompts(4096, (PROMPT_TOKENS, 300, 100)), psutil.virtual_memory().available
    texts, flags = [], ("--model", str(flash_next), "--load-format", "dummy", "--slots", "600")
    host_embedding, host_kv = ("--token-embedding-placement", "host"), ("--kv-placement", "host")
    for placed in ((), host_embedding, host_kv, (*host_embedding, *host_kv)):
        with running(*CUDA, *flags, *placed) as engine:
            texts.append([greedy(engine, [prompt])[0] for prompt in asked])
            assert ("of pinned host memory; one request" in engine.text()) == ("--kv-placement" in placed)
    assert texts == [texts[0]] * 4
    assert psutil.virtual_memory().available > ram - (1 << 30)


@pytest.mark.parametrize("quantised", ["nvfp4", "mxfp4", "fp8_block"])
def test_a_quantised_checkpoint_is_served(quantised: str, tmp_path: Path) -> None:
    """What the converter made of a checkpoint, at every threshold with the same answers, in a pool of a few experts;
    --collect-stats counts both phases, with the copy engine in the worker's process."""
    source, made, stats = tmp_path / "source", tmp_path / "made", tmp_path / "stats.json"
    source.mkdir()
    write_random_model(source, SIZES)
    assert quantise([str(source), str(made), "--format", quantised]) == 0
    asked = prompts(SIZES.vocab_size, (200, 64, 7))
    flags = (*CUDA, "--model", str(made), "--slots", "40", "--copy-engine", "thread", "--collect-stats", str(stats))
    texts = []
    for threshold in ("0", "64", "512"):
        with running(*flags, "--demand-tokens", threshold) as engine:
            texts.append([greedy(engine, [prompt])[0] for prompt in asked])
        counted = json.loads(stats.read_text("utf-8"))
        assert sum(counted["decode"]["misses"]) > 0
        assert sum(counted["demand"]["misses"]) > 0 or threshold == "0"
    assert texts == [texts[0]] * 3 and len({tuple(text) for text in texts[0]}) == len(asked)


def test_thresholds_do_not_change_the_text(flash_next: Path) -> None:
    """NVFP4 experts in Flash-Next's geometry, of which a sixth fits in the pool."""
    asked = prompts(4096, (PROMPT_TOKENS, 300, 100))
    texts = []
    for threshold in (0, 256, 512, 1024):
        flags = ("--model", str(flash_next), "--load-format", "dummy", "--slots", "600")
        with running(*CUDA, *flags, "--demand-tokens", str(threshold)) as engine:
            texts.append([greedy(engine, [prompt])[0] for prompt in asked])
    assert texts == [texts[0]] * 4
    assert len({tuple(text) for text in texts[0]}) == len(asked)


def test_structured_answers_and_what_is_seen_of_a_gpu() -> None:
    """Answers held to a JSON schema, beside a plain one that is unchanged by them, greedy and drawn; the residency that
    the page shows is what the worker counts; and the HTTP front completes to the same text."""
    digit = {"enum": list(range(10))}
    schema = {"type": "object", "properties": {"n": digit}, "required": ["n"], "additionalProperties": False}
    grammar = f"start: %json {json.dumps(schema | {'x-guidance': {'whitespace_flexible': False}})}"
    plain = prompts(300, (30,))[0]

    async def session(client: Client) -> None:
        alone = await client.generate(token_ids=plain, sampling=Sampling(max_tokens=NEW_TOKENS)).text()
        held = [Sampling(max_tokens=200, temperature=t, seed=3, n=2, grammar=grammar) for t in (0.0, 1.0)]
        texts = asyncio.gather(*(client.generate(prompt="a number", sampling=each).texts() for each in held))
        beside = await client.generate(token_ids=plain, sampling=Sampling(max_tokens=NEW_TOKENS)).text()
        assert beside == alone
        for text in [text for both in await texts for text in both]:
            assert json.loads(text)["n"] in digit["enum"]
        await asyncio.sleep(2 * FRESH_S)  # what is told is no older
        (seen,) = (await client.activity()).residency
        assert sum(byte.bit_count() for byte in seen.resident) == (await client.stats()).workers[0].resident_slots > 0
        body = {"prompt": plain, "max_tokens": NEW_TOKENS, "temperature": 0}
        assert await asyncio.to_thread(completed, engine.fact("HTTP"), body) == alone

    with running(*CUDA, "--dtype", "float32", "--slots", "128", "--http-port", "0") as engine:
        engine.over(session)


def completed(url: str, body: dict[str, Any]) -> str:
    """The text that the front at `url` completes with."""
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{url}/completions", json.dumps(body).encode(), headers), timeout=60) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
    return text


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["copyengine", "worker0"])
@pytest.mark.parametrize("prefill", ["demand", "streamed"])
def test_a_process_killed_in_a_step_is_started_anew_and_leaves_no_memory(
    flash_next: Path, victim: str, prefill: str
) -> None:
    """In the middle of a step: the request ends with an error, the engine serves again with the same text, and after
    its stop all memory is back. So that of the dead was, or what was started anew would not have fitted.
    """
    before, ram = free_nbytes(), psutil.virtual_memory().available
    threshold = "0" if prefill == "streamed" else "4096"
    flags = ("--model", str(flash_next), "--load-format", "dummy", "--slots", "600", "--demand-tokens", threshold)
    with running(*CUDA, *flags) as engine:
        asked = prompts(4096, (64,))
        expected = greedy(engine, asked, 8)
        argv = [sys.executable, "-c", ASK, engine.endpoint]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asking:
            time.sleep(1.0)
            engine.child(victim).send_signal(signal.SIGKILL)
            start = time.monotonic()
            said, _ = asking.communicate(timeout=30)
            assert time.monotonic() - start < 5 and "ended" in said, said
        engine.wait_for(lambda: any("serving again" in line for line in engine.errors), CUDA_START_TIMEOUT_S)
        assert greedy(engine, asked, 8) == expected
        children = engine.children()
        assert engine.stop() == 0
        assert gone(children, 5.0)
    assert all_free_again(before)
    assert psutil.virtual_memory().available > ram - (1 << 30)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["copyengine", "worker0"])
def test_a_process_stopped_in_a_step_goes_on_and_one_stopped_for_good_is_started_anew(
    flash_next: Path, victim: str
) -> None:
    """For 10 s: the answers under way are what they were before, and nobody dies. For good: the request ends with an
    error after the watchdog's time, and all serves again with the same text. At last all memory is back."""
    before = free_nbytes()
    flags = ("--model", str(flash_next), "--load-format", "dummy", "--slots", "600", "--demand-tokens", "0")
    exact = ("--deterministic", "--watchdog-s", f"{STOPPED_S + 5:g}")  # who decodes beside whom hangs on the stop
    with running(*CUDA, *flags, *exact) as engine:
        asked = prompts(4096, (500, 300, 200, 100))
        expected = greedy(engine, asked, LONG_ANSWER)
        stopped = engine.child(victim)
        with ThreadPoolExecutor() as pool:
            answers = pool.submit(greedy, engine, asked, LONG_ANSWER)
            time.sleep(0.3)
            stopped.suspend()
            time.sleep(STOPPED_S)
            assert not answers.done()
            stopped.resume()
            assert answers.result(120) == expected
        assert not [line for line in engine.errors if " anew (death " in line] and engine.child(victim) == stopped
        argv = [sys.executable, "-c", ASK, engine.endpoint]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asking:
            time.sleep(1.0)
            stopped.suspend()
            start_s = time.monotonic()
            said, _ = asking.communicate(timeout=60)
            assert time.monotonic() - start_s < STOPPED_S + 5 + ASK_S + 5 and "ended" in said, said
        engine.wait_for(lambda: any("serving again" in line for line in engine.errors), CUDA_START_TIMEOUT_S)
        (death,) = [line for line in engine.errors if " anew (death " in line]
        assert f"{victim} was killed by SIGKILL: it has answered nothing" in death
        assert greedy(engine, asked, LONG_ANSWER) == expected
    assert all_free_again(before)


STOPPED_S = 10.0
"""Seconds for which a process is stopped that goes on."""

LONG_ANSWER = 1500
"""Tokens that are not all there when the process is stopped, 0.3 s after the asking; an H200 decodes 60 sooner."""

ASK = """
import asyncio, sys
from copyengine.wire.errors import SlotstreamError
from scheduler.client import Client
from scheduler.protocol import Sampling

async def main():
    async with Client(sys.argv[1]) as client:
        try:
            while True:
                sampling = Sampling(max_tokens=50, ignore_eos=True)
                async for piece in client.generate(token_ids=[7] * 500, sampling=sampling):
                    pass
        except SlotstreamError as error:
            print("ended:", error)

asyncio.run(asyncio.wait_for(main(), 60))
"""


def test_two_workers_share_one_copy_of_the_experts(flash_next: Path) -> None:
    """On two GPUs: each answers as one worker alone does."""
    if len(free_nbytes()) < 2:
        pytest.skip("needs two GPUs")
    asked = prompts(4096, (200, 200, 300, 100))
    flags = ("--model", str(flash_next), "--load-format", "dummy", "--slots", "600")
    with running(*CUDA, *flags) as engine:
        expected = [greedy(engine, [prompt])[0] for prompt in asked]
    with running(*CUDA, *flags, "--workers", "2") as engine:
        assert greedy(engine, asked) == expected
        copying = [p for p in engine.children() if "copyengine" in p.cmdline()]
        assert len(copying) == 1 and engine.fact("workers").startswith("2 ")
