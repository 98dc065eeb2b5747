"""Faults of copies and of the GPU itself, in a running engine: against what it answered before, the checksums of its
slots, and what was free before it was started."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.wire.errors import RequestRefused
from scheduler.client import Client
from tests.e2e.engine import CUDA_START_TIMEOUT_S, running
from tests.e2e.faulty_engine import FaultyEngine, failure, faulty, verified_slots
from tests.e2e.test_cuda import all_free_again, free_nbytes, greedy, prompts
from tests.e2e.test_restarts import answer, begun
from worker.copy_checks import MOST_DAMAGED_STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SIZES = Sizes(
    layers=3, hidden=256, intermediate=128, experts=32, experts_per_token=4, heads=4, kv_heads=2, vocab_size=512
)
FLAGS = ("--device", "cuda", "--slots", "40", "--demand-tokens", "64", "--dtype", "float32", "--kv-tokens", "4096")
SHORT, LONG = prompts(512, (30, 100))
"""On demand and streamed."""

TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory, SIZES)
    return str(directory)


Session = Callable[[FaultyEngine, Client], Awaitable[None]]


def served(session: Session, path: Path, *flags: str) -> str:
    """Run `session` on an engine of its own, all of whose GPU memory comes back; what the engine printed."""
    before = free_nbytes()
    with faulty(path / "told.json", *FLAGS, *flags) as lying:
        lying.engine.over(lambda client: session(lying, client))
        text = lying.engine.text()
    assert all_free_again(before)
    return text


async def nothing_damaged(lying: FaultyEngine) -> int:
    """Every expert in a slot is what was loaded; how many there are. None after a step that used all slots and failed,
    which forgets what it used."""
    found = await asyncio.to_thread(verified_slots, lying.engine)
    assert found.damaged == [], f"(layer, expert) of those damaged, of {found.checked} in slots"
    return found.checked


async def all_sound(lying: FaultyEngine) -> None:
    """As `nothing_damaged`, and there are some."""
    assert await nothing_damaged(lying) > 0, "no expert was in a slot, so that none was looked at"


def test_verifying_changes_no_token(model: str) -> None:
    """On demand, streamed, by graphs, several at once; against the same engine without."""
    texts = []
    for more in ((), ("--verify-copies",)):
        with running(*FLAGS, "--model", model, *more) as engine:
            texts.append([greedy(engine, prompts(512, (5, 60, 200))) for _ in range(3)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("copy_engine", ["process", "thread"])
def test_a_dma_that_moves_nothing_ends_its_step(model: str, tmp_path: Path, copy_engine: str) -> None:
    """In a prefill on demand, in a streamed one, and in a decode step that is a graph; after the third the copy engine
    is started anew. Without --verify-copies the tokens are wrong."""

    async def session(lying: FaultyEngine, client: Client) -> None:
        before = await answer(client, TOKENS, SHORT), await answer(client, TOKENS, LONG)
        assert await answer(client, TOKENS, SHORT) == before[0], "its decode steps are graphs from here on"
        for number, prompt in enumerate((SHORT, LONG, None)):
            if prompt is None:
                going_on, _ = await begun(client, 400)
                lying.happen(copies="lie", at=[2])
                error = await failure(going_on)
            else:
                lying.happen(copies="lie", at=[2])
                error = await failure(answer(client, TOKENS, [number, *prompt]))
            assert error.code == "copy_damaged"
            assert re.search(r"expert \d+ of layer \d+ is damaged in its slot", error.detail)
            lying.happen()
            if number + 1 < MOST_DAMAGED_STEPS:
                await nothing_damaged(lying)
                assert (await answer(client, TOKENS, SHORT), await answer(client, TOKENS, LONG)) == before
                await all_sound(lying)
        await serving_again(lying, 1)
        assert (await answer(client, TOKENS, SHORT), await answer(client, TOKENS, LONG)) == before
        await all_sound(lying)

    served(session, tmp_path, "--model", model, "--verify-copies", "--copy-engine", copy_engine)


async def serving_again(lying: FaultyEngine, times: int) -> None:
    def said() -> bool:
        return sum("serving again" in line for line in lying.engine.errors) >= times

    await asyncio.to_thread(lying.engine.wait_for, said, CUDA_START_TIMEOUT_S)


def test_without_the_mode_the_tokens_are_wrong(model: str, tmp_path: Path) -> None:
    """So that the test above can fail."""

    async def session(lying: FaultyEngine, client: Client) -> None:
        before = await answer(client, TOKENS, SHORT)
        await answer(client, TOKENS, LONG)
        lying.happen(copies="lie", every=2)
        assert await answer(client, TOKENS, SHORT) != before

    served(session, tmp_path, "--model", model)


@pytest.mark.parametrize(("kind", "copy_engine"), [("memory", "process"), ("memory", "thread"), ("hog", "process")])
def test_a_prefill_that_finds_no_memory_ends_alone(model: str, tmp_path: Path, kind: str, copy_engine: str) -> None:
    """Told by torch alone, and with all of the GPU's memory really taken in the middle of the step; another answer,
    which is decoded meanwhile, is what it is alone, and so are the next.

    Not taken beside a copy engine that is a thread: torch gives cached memory back before it says that there is none,
    which waits for the step, and the driver may hold that thread's copies, which the step waits for, back until then.
    """

    async def session(lying: FaultyEngine, client: Client) -> None:
        before = {name: await answer(client, 60, prompt) for name, prompt in (("short", SHORT), ("long", LONG))}
        for prompt in (SHORT, LONG):
            going_on, _ = await begun(client, 60)
            lying.happen(prefill=kind, at=[1])
            with pytest.raises(RequestRefused) as refused:
                await answer(client, TOKENS, [9, *prompt])
            assert refused.value.code == "device_out_of_memory", refused.value
            assert "did not fit in the device's memory: CUDA out of memory" in refused.value.detail
            lying.happen()
            assert len(await going_on) == 60
            assert await answer(client, 60, SHORT) == before["short"]
            assert await answer(client, 60, LONG) == before["long"]
        await all_sound(lying)
        assert (await client.stats()).restarts == 0

    served(session, tmp_path, "--model", model, "--verify-copies", "--copy-engine", copy_engine)


def test_a_copy_that_the_driver_refuses_ends_its_step(model: str, tmp_path: Path) -> None:
    async def session(lying: FaultyEngine, client: Client) -> None:
        before = await answer(client, TOKENS, SHORT), await answer(client, TOKENS, LONG)
        for prompt in (SHORT, LONG):
            lying.happen(copies="refuse", at=[3])
            error = await failure(answer(client, TOKENS, [9, *prompt]))
            assert (error.code, error.detail) == ("worker_failed", "experts of this step did not land")
        lying.happen()
        assert (await answer(client, TOKENS, SHORT), await answer(client, TOKENS, LONG)) == before
        await all_sound(lying)
        assert (await client.stats()).restarts == 0

    served(session, tmp_path, "--model", model, "--verify-copies")


@pytest.mark.parametrize("told", [{"copies": "break"}, {"prefill": "poison"}], ids=["copy engine", "worker"])
def test_an_error_that_leaves_the_context_of_no_use_ends_its_process(
    model: str, tmp_path: Path, told: dict[str, str]
) -> None:
    """An illegal address, of the copy engine's context as its driver tells it, of the worker's a real one: requests end
    in time, the others are started anew, and answers are those of before."""

    async def session(lying: FaultyEngine, client: Client) -> None:
        before = await answer(client, TOKENS, SHORT)
        lying.happen(**told, at=[3 if "copies" in told else 1])
        assert (await failure(answer(client, TOKENS, [9, *SHORT]))).code == "worker_failed"
        lying.happen()
        await serving_again(lying, 1)
        assert await answer(client, TOKENS, SHORT) == before
        await all_sound(lying)

    served(session, tmp_path, "--model", model, "--verify-copies")
