"""Copies that fail or lie, and steps that find no memory or meet an error of the device, in a running engine.

Seen by its clients, against what it answered before, and, with --verify-copies, against the checksums of its slots.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.device import ledger
from copyengine.wire.errors import RequestRefused
from scheduler.client import Client
from scheduler.protocol import StatsReply
from tests.e2e.engine import Engine
from tests.e2e.faulty_engine import FaultyEngine, failure, faulty, verified_slots, worker_stats
from tests.e2e.test_restarts import answer, begun
from tests.e2e.windows import CONDITIONS
from worker.copy_checks import MOST_DAMAGED_STEPS

FLAGS = ("--slots", "40", "--demand-tokens", "64", "--chunked-prefill-size", "128", "--kv-tokens", "2048")
SIZES = Sizes(
    layers=4, hidden=64, intermediate=64, experts=32, experts_per_token=4, heads=2, kv_heads=1, head_dim=32,
    vocab_size=1024, max_position=512, dense_intermediate=64,
)  # fmt: skip
SHORT, LONG = list(range(300, 330)), list(range(500, 600))
"""On demand and streamed."""

TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_random_model(directory, SIZES, dtype="float32")
    return str(directory)


@pytest.fixture(scope="module", params=["uvloop", pytest.param("windows", marks=pytest.mark.slow)])
def verifying(
    request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyEngine]:
    """One with --verify-copies for all tests: each leaves it serving."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    event_loop, env = ("uvloop", {}) if request.param == "uvloop" else ("selector", CONDITIONS)
    path = tmp_path_factory.mktemp("faults") / "told.json"
    flags = (*FLAGS, "--model", model, "--verify-copies", "--event-loop", event_loop)
    with faulty(path, *flags, env=env) as started:
        yield started


Session = Callable[[Client], Awaitable[None]]


def over(faulty: FaultyEngine, session: Session) -> None:
    """`session`, after which nothing fails any more and nothing has leaked."""

    async def watched(client: Client) -> None:
        before = held(faulty.engine, await client.stats())
        await session(client)
        faulty.happen()
        assert held(faulty.engine, await client.stats()) == before

    faulty.engine.over(watched)


def held(engine: Engine, stats: StatsReply) -> tuple[object, ...]:
    """What requests and processes take and must give back."""
    idle = stats.running, stats.waiting, stats.kv_pages_total - stats.kv_pages_available
    run = next(flag for flag in engine.child("copyengine").cmdline() if flag.startswith("--run-id="))
    shared = [path.name for path in ledger.directory().iterdir() if path.name.startswith(run.partition("=")[2])]
    return (*idle, len(shared))


def test_a_copy_that_moves_nothing_ends_its_step_and_no_token_is_ever_wrong(verifying: FaultyEngine) -> None:
    """Lies while many are asked, four at a time: an answer is that of before, or an error that names the expert, and
    nothing that is damaged stays in a slot."""

    async def session(client: Client) -> None:
        prompts = {"short": SHORT, "long": LONG, **{f"{i}": list(range(40 * i, 40 * i + 33)) for i in range(1, 5)}}
        expected = {name: await answer(client, TOKENS, prompt) for name, prompt in prompts.items()}
        failed_before = (await client.stats()).workers[0].failed_steps.get("copy_damaged", 0)
        damaged: list[str] = []
        right = 0

        async def ask(name: str) -> None:
            nonlocal right
            try:
                tokens = await answer(client, TOKENS, prompts[name])
            except RequestRefused as error:
                assert error.code == "copy_damaged", error
                damaged.append(str(error))
            else:
                assert tokens == expected[name]
                right += 1

        for at in ([3], [150])[: MOST_DAMAGED_STEPS - 1]:
            verifying.happen(copies="lie", at=at)
            names = [*prompts, *prompts]
            for i in range(0, len(names), 4):
                await asyncio.gather(*map(ask, names[i : i + 4]))
            assert (await asyncio.to_thread(verified_slots, verifying.engine)).damaged == []
        verifying.happen()
        assert right >= 16 and all(
            re.search(r"expert \d+ of layer \d+ is damaged in its slot", text) for text in damaged
        )
        steps = (await client.stats()).workers[0].failed_steps["copy_damaged"] - failed_before
        assert 1 <= steps <= len(damaged) and steps < MOST_DAMAGED_STEPS

    over(verifying, session)


@pytest.mark.parametrize("verifying", ["uvloop", pytest.param("windows", marks=pytest.mark.slow)], indirect=True)
def test_after_some_damaged_steps_copy_engine_and_worker_are_started_anew(verifying: FaultyEngine) -> None:
    """Their number is MOST_DAMAGED_STEPS of one worker; then answers are those of before."""

    async def session(client: Client) -> None:
        before = await answer(client, TOKENS, SHORT)
        ran = {name: verifying.engine.child(name).pid for name in ("copyengine", "worker0", "scheduler")}
        done = (await asyncio.to_thread(worker_stats, verifying.engine)).damaged_steps
        restarts = (await client.stats()).restarts
        for i in range(done, MOST_DAMAGED_STEPS):
            verifying.happen(copies="lie", at=[2])
            error = await failure(answer(client, TOKENS, [700 + i, *SHORT]))
            assert error.code == "copy_damaged"
        verifying.happen()
        await asyncio.to_thread(verifying.engine.wait_for, lambda: again(verifying.engine) > restarts)
        kept = [name for name, pid in ran.items() if verifying.engine.child(name).pid == pid]
        assert kept == ["scheduler"]
        assert await answer(client, TOKENS, SHORT) == before
        assert (await asyncio.to_thread(worker_stats, verifying.engine)).damaged_steps == 0
        said = verifying.engine.text()
        why = f"damaged experts in {MOST_DAMAGED_STEPS} steps"
        assert re.search(rf"event=copies_distrusted detail=.*{why}", said)
        assert "event=copy_engine_lost" not in said
        assert re.search(rf"copyengine was killed by SIGKILL: .* because worker0 ended with exit code 3: .*{why}", said)

    over(verifying, session)


def again(engine: Engine) -> int:
    return sum("serving again" in line for line in engine.errors)


@pytest.mark.parametrize("kind", ["memory", "error"])
def test_a_prefill_that_finds_no_memory_or_a_broken_call_ends_alone(verifying: FaultyEngine, kind: str) -> None:
    """On demand and streamed, while another answer is decoded: that one is what it is alone, and so are the next."""

    async def session(client: Client) -> None:
        alone = await answer(client, 60, SHORT)
        after = await answer(client, TOKENS, LONG)
        for prompt in (SHORT, LONG):
            going_on, _ = await begun(client, 60)
            verifying.happen(prefill=kind, at=[1])
            error = await failure(answer(client, TOKENS, [9, *prompt]))
            if kind == "memory":
                assert error.code == "device_out_of_memory"
                assert re.search(r"a (demand|streamed) step of \d+ tokens did not fit in the device's", str(error))
                assert "--chunked-prefill-size" in error.detail and "--slots" in error.detail
            else:
                assert error.code == "worker_failed" and "RuntimeError; the log says where" in error.detail
            verifying.happen()
            assert await going_on == alone
            assert await answer(client, TOKENS, SHORT) == alone[:TOKENS]
            assert await answer(client, TOKENS, LONG) == after
        assert (await asyncio.to_thread(verified_slots, verifying.engine)).damaged == []

    over(verifying, session)


def test_a_copy_that_is_refused_ends_its_step_and_the_next_ones_work(verifying: FaultyEngine) -> None:
    async def session(client: Client) -> None:
        before = await answer(client, TOKENS, SHORT), await answer(client, TOKENS, LONG)
        for prompt in (SHORT, LONG):
            verifying.happen(copies="refuse", at=[5])
            error = await failure(answer(client, TOKENS, [9, *prompt]))
            assert error.code == "worker_failed"
            assert re.fullmatch(r"\d+ experts of layer \d+ did not land", error.detail)
        verifying.happen()
        assert (await answer(client, TOKENS, SHORT), await answer(client, TOKENS, LONG)) == before
        assert (await asyncio.to_thread(verified_slots, verifying.engine)).damaged == []

    over(verifying, session)


@pytest.mark.parametrize("verifying", [pytest.param("uvloop", marks=pytest.mark.slow), "windows"], indirect=True)
def test_an_error_of_the_driver_that_stays_ends_the_copy_engine_and_another_one_serves(
    verifying: FaultyEngine,
) -> None:
    async def session(client: Client) -> None:
        before = await answer(client, TOKENS, SHORT)
        ran, times = verifying.engine.child("copyengine").pid, again(verifying.engine)
        verifying.happen(copies="break", at=[5])
        error = await failure(answer(client, TOKENS, [9, *SHORT]))
        assert error.code == "worker_failed"
        verifying.happen()
        await asyncio.to_thread(verifying.engine.wait_for, lambda: again(verifying.engine) > times)
        assert verifying.engine.child("copyengine").pid != ran
        assert await answer(client, TOKENS, SHORT) == before
        assert (await asyncio.to_thread(verified_slots, verifying.engine)).damaged == []

    over(verifying, session)


@pytest.mark.slow
def test_without_the_mode_a_copy_that_moves_nothing_is_answered_with(model: str, tmp_path: Path) -> None:
    """What the tests above would show if nothing were compared: other tokens than before, and nobody is told."""

    with faulty(tmp_path / "told.json", *FLAGS, "--model", model) as lying:

        async def session(client: Client) -> None:
            before = await answer(client, TOKENS, SHORT)
            await answer(client, TOKENS, LONG)
            lying.happen(copies="lie", every=2)
            assert await answer(client, TOKENS, [*SHORT[:16], *SHORT[16:]]) != before
            with pytest.raises(RequestRefused, match="--verify-copies"):
                await asyncio.to_thread(verified_slots, lying.engine)

        lying.engine.over(session)
