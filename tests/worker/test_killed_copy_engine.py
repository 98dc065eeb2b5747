"""A copy engine that is killed in the middle of a record: what the worker's slots hold then, against the checkpoint."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
import zmq.asyncio

from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.client import CopyEngineClient
from copyengine.config import CopyEngineConfig
from copyengine.device import ledger
from copyengine.device.host import HostWorkerDevice, reclaim_stale
from copyengine.records import record_layout
from copyengine.wire import cli
from copyengine.wire.child import Child
from copyengine.wire.errors import PeerDied
from copyengine.wire.lifecycle import Listening
from tests.worker.resident_experts import read_banks
from tests.worker.test_main import Processes, processes
from worker.geometry import SlotGeometry
from worker.host_slots import ExpertSlots
from worker.protocol import Mode

SIZES = Sizes(
    layers=2, hidden=32, intermediate=32, experts=8, experts_per_token=2, heads=2, kv_heads=1, head_dim=16,
    vocab_size=64, max_position=256, dense_intermediate=32,
)  # fmt: skip
MAX_QUERY = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_random_model(directory, SIZES, dtype="float32")
    return directory


def run_step(slots: ExpertSlots, mode: Mode) -> BaseException | None:
    """A step over all experts of all layers, as the worker's thread runs it; what it failed with."""
    try:
        slots.begin_step(mode)
        for layer in range(SIZES.layers):
            for _ in slots.groups(layer, list(range(SIZES.experts))):
                pass
        slots.end_step()
    except PeerDied as error:
        slots.abort_step()
        return error
    return None


async def killed_in_a_step(started: Processes, model: Path, mode: Mode, records: np.ndarray) -> ExpertSlots:
    """The slots of a worker whose copy engine was killed with a record half copied."""
    loop, context = asyncio.get_running_loop(), zmq.asyncio.Context()
    client = CopyEngineClient(context, started.event("c", Listening).endpoint)
    loaded = await client.load(str(model), "float32")
    geometry = SlotGeometry(SIZES.layers, SIZES.experts, loaded.record_nbytes, slots=11, max_query=MAX_QUERY)

    def wake() -> None:
        asyncio.run_coroutine_threadsafe(client.wake("w"), loop)

    slots = ExpertSlots(HostWorkerDevice(), "test", "w", geometry, wake)
    await client.attach(slots.attach_request)
    step = asyncio.create_task(asyncio.to_thread(run_step, slots, mode))
    async with asyncio.timeout(20):
        while not half_copied(slots.pool_bytes, records):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert started.segments("c")
    started.children["c"].kill()
    await asyncio.wait_for(client.lost.wait(), 20)
    slots.release("the copy engine is gone")  # as worker/load.py does
    assert isinstance(await step, PeerDied)
    await client.close()
    context.term()
    return slots


def half_copied(pool: np.ndarray, records: np.ndarray) -> list[int]:
    """Slots of which the first half is a record's, and the whole is none."""
    half = records.shape[-1] // 2
    known = {record.tobytes() for record in records.reshape(-1, records.shape[-1])}
    halves = {record[:half] for record in known}
    return [slot for slot, held in enumerate(pool) if held[:half].tobytes() in halves and held.tobytes() not in known]


@pytest.mark.skipif(sys.platform == "win32", reason="kills as POSIX does")
@pytest.mark.parametrize(
    ("mode", "copies"), [("demand", 1), ("demand", 3), ("demand", 5), ("streamed", 1), ("streamed", 14)]
)
def test_no_slot_is_resident_that_was_not_copied_in_full(model: Path, mode: Mode, copies: int) -> None:
    """In the first, in the middle of and near the end of a step's copies, where experts had to make room for others;
    nothing of the dead stays in memory. On demand a copy is a query's, streamed it is a record's."""
    checkpoint = open_model(model)
    record = record_layout(checkpoint.spec, "float32")
    assert record is not None
    records = read_banks(checkpoint, record)
    with processes() as started:
        argv = [str(copies), *cli.to_argv(CopyEngineConfig(parent_pipe=True))]
        started.children["c"] = Child("c", "tests.copyengine.halting_copyengine", argv, started.notices)
        slots = asyncio.run(killed_in_a_step(started, model, mode, records))
        owners = slots._state.owner.tolist()
        resident = [(slot, *divmod(owner, SIZES.experts)) for slot, owner in enumerate(owners) if owner >= 0]
        assert len(resident) == slots.resident() <= MAX_QUERY * (copies - 1)
        assert resident or copies == 1 or mode == "streamed"
        for slot, layer, expert in resident:
            assert np.array_equal(slots.pool_bytes[slot], records[layer, expert]), (slot, layer, expert)
        assert half_copied(slots.pool_bytes, records)
        slots.close()
        started.children["c"].stop()
        reclaim_stale()
        assert not started.segments("c") and not ledger.stale()
