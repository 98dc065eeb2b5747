"""The copy engine as a process, as a thread and in this loop, spoken to by its client.

Checked against the checkpoint (banks are what `read_experts` reads), and by whole steps of a worker's slots over it.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq.asyncio
from msgspec.structs import replace

from copyengine.__main__ import serve
from copyengine.checkpoint.dummy import fill_dummy_experts
from copyengine.checkpoint.input_scales import MADE_UP
from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.checkpoint.reader import read_experts
from copyengine.client import CopyEngineClient
from copyengine.config import CopyEngineConfig
from copyengine.copier import Attachment
from copyengine.device.host import HostCopyDevice, HostWorkerDevice, reclaim_stale
from copyengine.device.probe import cuda_devices
from copyengine.loading import DUMMY_SEED, BankLoader
from copyengine.protocol import Attach, Load, Loaded, LoadProgress
from copyengine.server import CopyEngineServer
from copyengine.thread import CopyEngineThread
from copyengine.wire.errors import ConfigError, PeerDied, RequestRefused, SlotstreamError, WireError
from copyengine.wire.lifecycle import Listening, Ready, StartFailed, parse_event
from copyengine.wire.loop import EventLoop, run
from kernels.formats import layout
from worker.client import WorkerClient
from worker.geometry import SlotGeometry
from worker.host_slots import ExpertSlots
from worker.protocol import Load as WorkerLoad

SIZES = Sizes(layers=2, hidden=32, intermediate=16, experts=6, experts_per_token=2, heads=2, kv_heads=1, vocab_size=64)
LOOPS: tuple[EventLoop, ...] = ("uvloop", "selector") if sys.platform != "win32" else ("selector",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory, SIZES)
    return str(directory)


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("dense")
    write_random_model(directory, replace(SIZES, experts=0, experts_per_token=0))
    return str(directory)


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Children get it too, by TMPDIR."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def entries(ledger: Path) -> list[str]:
    return [path.name for directory in ledger.glob("slotstream-*") for path in directory.iterdir()]


def banks_are_there(ledger: Path) -> None:
    """Returns once both are."""
    while len(entries(ledger)) < SIZES.layers:
        time.sleep(0.01)


@asynccontextmanager
async def engine(config: CopyEngineConfig | None = None) -> AsyncIterator[tuple[CopyEngineServer, CopyEngineClient]]:
    """A server in this loop, and a client of it."""
    context = zmq.asyncio.Context()
    server = CopyEngineServer(config or CopyEngineConfig(), context)
    client = CopyEngineClient(context, server.bind())
    running = asyncio.create_task(server.run())
    try:
        yield server, client
    finally:
        await client.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.close()
        context.term()


def slots_for(loaded: Loaded, client: CopyEngineClient) -> ExpertSlots:
    loop = asyncio.get_running_loop()
    geometry = SlotGeometry(loaded.moe_layers, loaded.experts, loaded.record_nbytes, 4)

    def wake() -> None:
        asyncio.run_coroutine_threadsafe(client.wake("w"), loop)

    return ExpertSlots(HostWorkerDevice(), "test", "w", geometry, wake, deadline_s=10)


def expected_records(model: str, dtype: str = "bfloat16") -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    opened = open_model(model)
    record = layout(dtype, SIZES.hidden, SIZES.intermediate)
    banks = [np.zeros((SIZES.experts, record.record_nbytes), np.uint8) for _ in range(SIZES.layers)]
    read_experts(opened, record, banks, lambda _: None)
    return banks


async def serve_steps(client: CopyEngineClient, model: str) -> None:
    """Load, attach, and a step of each mode whose slots must hold the checkpoint's records."""
    loaded = await client.load(model, "bfloat16")
    records = expected_records(model)
    assert (loaded.moe_layers, loaded.experts, loaded.record_nbytes) == (2, 6, records[0].shape[1])
    slots = slots_for(loaded, client)
    await client.attach(slots.attach_request)

    def steps() -> None:
        for mode in ("streamed", "demand", "decode"):
            slots.begin_step(mode)
            for layer in range(2):
                for group in slots.groups(layer, [0, 2, 5]):
                    assert np.array_equal(slots.pool_bytes[group.slots], records[layer][group.experts])
            slots.end_step()

    await asyncio.to_thread(steps)
    stats = await client.stats()
    assert stats.workers == ["w"] and stats.bank_nbytes == stats.pageable_nbytes == loaded.bank_nbytes
    assert (stats.stream.records, stats.demand.failed_queries, stats.dropped_frames) == (12, 0, 0)
    await client.detach("w")
    assert (await client.stats()).workers == []
    slots.close()


def test_input_scales_come_with_the_banks_where_activations_are_rounded(model: str, ledger: Path) -> None:
    """Of made-up weights; a second load that asks for them otherwise is another model."""
    nvfp4 = '{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}'

    async def test() -> None:
        async with engine() as (_, client):
            loaded = await client.load(model, "bfloat16", nvfp4, load_format="dummy", expert_activations="w4a4")
            assert loaded.input_scales == [(MADE_UP, MADE_UP)] * 2
            with pytest.raises(ConfigError, match="start another one"):
                await client.load(model, "bfloat16", nvfp4, load_format="dummy")
        async with engine() as (_, client):
            assert (await client.load(model, "bfloat16", nvfp4, load_format="dummy")).input_scales == []

    run(test(), "selector")


def in_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    for loop in LOOPS:
        run(test(), loop)


def test_steps_over_a_server_in_this_loop(model: str, ledger: Path) -> None:
    async def test() -> None:
        async with engine() as (_, client):
            await serve_steps(client, model)
        assert entries(ledger) == []

    in_both_loops(test)


def test_steps_over_a_thread(model: str, ledger: Path) -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        with CopyEngineThread(CopyEngineConfig(event_loop="selector"), context) as thread:
            client = CopyEngineClient(context, thread.endpoint)
            await serve_steps(client, model)
            await client.close()
        context.term()
        assert entries(ledger) == []

    in_both_loops(test)


def test_a_thread_that_fails_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(self: CopyEngineServer) -> str:
        raise ConfigError("no")

    monkeypatch.setattr(CopyEngineServer, "bind", bind)
    dead = threading.Event()
    context = zmq.asyncio.Context()
    with pytest.raises(PeerDied, match="did not start"):
        CopyEngineThread(CopyEngineConfig(), context, dead.set).start()
    assert dead.wait(10) and "event=copy_thread_failed" in caplog.text
    context.term()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_banks_hold_what_the_checkpoint_holds(model: str, dtype: str) -> None:
    """Byte for byte; the facts of Loaded add up; progress rises to the whole."""

    async def test() -> None:
        async with engine() as (server, client):
            progress: list[LoadProgress] = []
            loaded = await client.load(model, dtype, on_progress=progress.append)  # type: ignore[arg-type]
            records = expected_records(model, dtype)
            banks = server._loader.banks
            assert banks is not None
            assert all(np.array_equal(a, b) for a, b in zip(banks.records, records, strict=True))
            assert loaded.bank_nbytes == sum(bank.nbytes for bank in records)
            assert progress[-1].done_nbytes == progress[-1].total_nbytes == loaded.read_nbytes
            assert await client.load(model, dtype) == loaded  # type: ignore[arg-type]

    run(test(), "selector")


def test_experts_are_made_up_if_asked_for(model: str) -> None:
    """What fill_dummy_experts makes; no file is read. Weights from the files are then another load."""

    async def test() -> None:
        async with engine() as (server, client):
            progress: list[LoadProgress] = []
            loaded = await client.load(model, "bfloat16", on_progress=progress.append, load_format="dummy")
            record = layout("bfloat16", SIZES.hidden, SIZES.intermediate)
            made_up = [np.zeros((SIZES.experts, record.record_nbytes), np.uint8) for _ in range(SIZES.layers)]
            fill_dummy_experts(record, made_up, DUMMY_SEED, lambda _: None)
            banks = server._loader.banks
            assert banks is not None and loaded.read_nbytes == 0
            assert all(np.array_equal(a, b) for a, b in zip(banks.records, made_up, strict=True))
            assert progress[-1] == LoadProgress("made-up experts", banks.nbytes, banks.nbytes)
            with pytest.raises(ConfigError, match="holds"):
                await client.load(model, "bfloat16")

    run(test(), "selector")


def test_loads_join_or_are_refused(model: str, dense_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads of one model read it once; another model is refused during and after; Attach and Wake before Load."""
    reads = []
    gate = threading.Event()

    def slow(*arguments: Any) -> int:
        reads.append(1)
        assert gate.wait(10)
        return read_experts(*arguments)

    monkeypatch.setattr("copyengine.loading.read_experts", slow)

    async def test() -> None:
        async with engine() as (_, client):
            fake = slots_for(Loaded(128, 1, 1, 0, 0, 0.0), client)
            with pytest.raises(RequestRefused, match="Load"):
                await client.attach(fake.attach_request)
            fake.close()
            await client.wake("w")
            await client.detach("nobody")
            loads = [asyncio.create_task(client.load(model, "bfloat16")) for _ in range(2)]
            await asyncio.sleep(0.05)
            for other, dtype in ((dense_model, "bfloat16"), (model, "float32")):
                with pytest.raises(ConfigError, match="holds"):
                    await client.load(other, dtype)  # type: ignore[arg-type]
            gate.set()
            first, second = await asyncio.gather(*loads)
            assert first == second and len(reads) == 1
            with pytest.raises(ConfigError, match="holds"):
                await client.load(dense_model, "bfloat16")

    run(test(), "selector")


def test_a_load_that_fails_may_be_tried_again(model: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with engine() as (_, client):
            with pytest.raises(ConfigError, match="nowhere"):
                await client.load(str(tmp_path / "nowhere"), "bfloat16")
            assert (await client.load(model, "bfloat16")).experts == 6

    run(test(), "selector")


def test_a_client_that_leaves_does_not_end_the_load(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def slow(*arguments: Any) -> int:
        assert gate.wait(10)
        return read_experts(*arguments)

    monkeypatch.setattr("copyengine.loading.read_experts", slow)

    async def test() -> None:
        async with engine() as (_, client):
            other = CopyEngineClient(zmq.asyncio.Context.instance(), client._rpc.endpoint)
            leaving = asyncio.create_task(other.load(model, "bfloat16"))
            await asyncio.sleep(0.2)
            leaving.cancel()
            await other.close()
            await asyncio.sleep(0.2)
            gate.set()
            assert (await client.load(model, "bfloat16")).experts == 6
        zmq.asyncio.Context.instance().term()

    run(test(), "selector")


def test_a_stop_ends_a_load(model: str, ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader goes on for ever, but every byte it reports may be its last."""

    def endless(_model: Any, _layout: Any, _banks: Any, on_bytes: Callable[[int], None]) -> int:
        while True:
            on_bytes(1)

    monkeypatch.setattr("copyengine.loading.read_experts", endless)

    async def test() -> None:
        async with engine() as (_, client):
            load = asyncio.create_task(client.load(model, "bfloat16"))
            await asyncio.sleep(0.3)
        with pytest.raises(PeerDied):
            await load
        assert entries(ledger) == []

    run(test(), "selector")


def test_banks_that_come_after_their_load_was_cancelled_are_freed(
    model: str, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the event loop ends while the thread still reads."""
    gate = threading.Event()

    def slow(*arguments: Any) -> int:
        assert gate.wait(10)
        return read_experts(*arguments)

    monkeypatch.setattr("copyengine.loading.read_experts", slow)

    async def test() -> None:
        loader = BankLoader(HostCopyDevice(), "run")

        async def tell(_: LoadProgress) -> None:
            return

        load = asyncio.create_task(loader.load(Load(model, "bfloat16"), tell))
        await asyncio.to_thread(banks_are_there, ledger)
        load.cancel()
        assert loader._task is not None
        loader._task.cancel()
        await asyncio.gather(load, return_exceptions=True)

    run(test(), "selector")
    gate.set()
    for _ in range(1000):
        if not entries(ledger):
            break
        time.sleep(0.005)
    assert entries(ledger) == []


def test_each_phase_of_a_load_is_told_to_its_end(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ends, and the load with it, before the next look at it."""
    monkeypatch.setattr("copyengine.loading.PROGRESS_S", 10.0)
    told: list[LoadProgress] = []

    async def test() -> None:
        loader = BankLoader(HostCopyDevice(), "run")

        async def tell(progress: LoadProgress) -> None:
            told.append(progress)

        await loader.load(Load(model, "bfloat16", checksums=True), tell)
        assert loader.banks is not None
        nbytes = loader.banks.nbytes
        assert [progress.phase for progress in told] == ["expert banks", "experts", "checksums"]
        assert all(progress.done_nbytes == progress.total_nbytes for progress in told)
        assert told[0].total_nbytes == told[2].total_nbytes == nbytes
        await loader.close()

    run(test(), "selector")


def test_a_thread_that_does_not_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    bind = CopyEngineServer.bind

    def slow(self: CopyEngineServer) -> str:
        assert gate.wait(10)
        return bind(self)

    monkeypatch.setattr(CopyEngineServer, "bind", slow)
    for name in ("START_S", "STOP_S"):
        monkeypatch.setattr(f"copyengine.thread.{name}", 0.05)
    context = zmq.asyncio.Context()
    thread = CopyEngineThread(CopyEngineConfig(), context)
    with pytest.raises(PeerDied, match=r"0\.05 s"):
        thread.start()
    assert not thread.stop()
    gate.set()
    monkeypatch.setattr("copyengine.thread.STOP_S", 10)
    while thread._server is None:
        time.sleep(0.005)
    assert thread.stop()
    context.term()


def test_a_dense_model_has_no_banks(dense_model: str) -> None:
    async def test() -> None:
        async with engine() as (_, client):
            loaded = await client.load(dense_model, "bfloat16")
            assert (loaded.record_nbytes, loaded.moe_layers, loaded.experts, loaded.bank_nbytes) == (0, 0, 0, 0)
            fake = slots_for(Loaded(128, 1, 1, 0, 0, 0.0), client)
            with pytest.raises(RequestRefused, match="MoE"):
                await client.attach(fake.attach_request)
            fake.close()

    run(test(), "selector")


def test_attach_refuses_memory_that_is_not_what_it_says(model: str) -> None:
    """Too few bytes for the slots, no ring in the ring, a segment that is gone; the server goes on."""

    async def test() -> None:
        async with engine() as (_, client):
            slots = slots_for(await client.load(model, "bfloat16"), client)
            good = slots.attach_request
            gone = replace(good.pool, name="slotstream-none")
            wrong: list[tuple[Any, type[SlotstreamError]]] = [
                (replace(good, pool_slots=good.pool_slots + 1), WireError),
                (replace(good, pool=replace(good.pool, nbytes=1 << 40)), WireError),
                (replace(good, ring=good.pool), WireError),
                (replace(good, pool=gone), PeerDied),
                (replace(good, flags=replace(good.flags, nbytes=good.flags.nbytes - 1)), WireError),
                (replace(good, pool_slots=-5), WireError),
                (replace(good, ring=replace(good.ring, name="../../etc/passwd")), WireError),
                (replace(good, ring=replace(good.ring, name="")), WireError),
                (replace(good, pool=replace(good.pool, kind="cuda_ipc")), WireError),
                (replace(good, ring=replace(good.ring, kind="cuda_local")), WireError),
                (replace(good, pool=replace(good.pool, device="0000:01:00.0")), WireError),
            ]
            for request, error in wrong:
                with pytest.raises(error):
                    await client.attach(request)
            await client.attach(good)
            assert (await client.stats()).workers == ["w"]
            slots.close()

    run(test(), "selector")


DYING_WORKER = """
import asyncio, sys
import zmq.asyncio
from copyengine.client import CopyEngineClient
from copyengine.device.host import create_segment
from copyengine.protocol import Attach
from copyengine.ring import RingWriter, ring_nbytes

async def main():
    client = CopyEngineClient(zmq.asyncio.Context(), sys.argv[1])
    sizes = {"pool": 1 << 20, "flags": 64, "ring": ring_nbytes(8)}
    pool, flags, ring = [create_segment("t", label, nbytes) for label, nbytes in sizes.items()]
    RingWriter(ring.array, 8).begin_step()
    await client.attach(Attach("w", pool.handle, flags.handle, ring.handle, 4))
    print("attached", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills as POSIX does")
def test_a_worker_that_is_killed_in_a_step_is_dropped(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its memory comes back, and the copy loop, which its step kept awake, sleeps. One that lives stays."""
    monkeypatch.setattr("copyengine.server.DEAD_POLL_S", 0.05)

    async def test() -> None:
        async with engine() as (_, client):
            loaded = await client.load(model, "bfloat16")
            living = slots_for(loaded, client)
            await client.attach(replace(living.attach_request, worker="other"))
            argv = [sys.executable, "-c", DYING_WORKER, client.endpoint]
            with subprocess.Popen(argv, stdout=subprocess.PIPE) as worker:  # noqa: ASYNC220
                assert worker.stdout is not None
                assert await asyncio.to_thread(worker.stdout.readline) == b"attached\n"
                await asyncio.sleep(0.2)
                stats = await client.stats()
                assert stats.workers == ["other", "w"] and not stats.asleep
                worker.kill()
            reclaim_stale()
            async with asyncio.timeout(10):
                while (stats := await client.stats()).workers != ["other"] or not stats.asleep:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await client.attach(living.attach_request)
            await asyncio.sleep(0.2)
            assert (await client.stats()).workers == ["other", "w"]
            living.close()

    run(test(), "selector")


@pytest.mark.parametrize("meanwhile", ["detached", "replaced"])
def test_the_watch_over_dead_workers_keeps_up_with_what_happens_meanwhile(
    model: str, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """While one dead worker is dropped another leaves or comes back; and a look at who lives may fail."""
    monkeypatch.setattr("copyengine.server.DEAD_POLL_S", 0.01)
    seen = list[set[str]]()
    dead = set[str]()
    unreadable = list[OSError]()

    def owned(names: Collection[str]) -> set[str]:
        seen.append(set(names))
        if unreadable:
            raise unreadable.pop()
        return set(names) - dead

    async def test() -> None:
        async with engine() as (server, client):
            loaded = await client.load(model, "bfloat16")
            slots, successor = slots_for(loaded, client), slots_for(loaded, client)
            monkeypatch.setattr("copyengine.server.ledger.owned", owned)
            for name in ("first", "second"):
                await client.attach(replace(slots.attach_request, worker=name))
            drop = server._copier.drop

            def slow_drop(attachment: Attachment) -> "Future[None]":
                dropped: Future[None] = Future()
                asyncio.get_running_loop().call_later(0.2, lambda: drop(attachment).add_done_callback(done))

                def done(of: "Future[None]") -> None:
                    dropped.set_result(of.result())

                return dropped

            monkeypatch.setattr(server._copier, "drop", slow_drop)
            dead.add(slots.attach_request.ring.name)
            async with asyncio.timeout(20):
                while "first" in server._watched:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            if meanwhile == "detached":
                await client.detach("second")
            else:
                await client.attach(replace(successor.attach_request, worker="second"))
            looks = len(seen)
            unreadable.append(OSError("the ledger cannot be read"))
            async with asyncio.timeout(20):
                while len(seen) < looks + 8 or "first" in (await client.stats()).workers:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            left = ["second"] if meanwhile == "replaced" else []
            assert (await client.stats()).workers == list(server._watched) == left
            slots.close()
            successor.close()

    run(test(), "selector")


def test_an_attach_for_which_nobody_can_say_who_lives_maps_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def owned(names: Collection[str]) -> set[str]:
        raise ConfigError("no directory to list shared memory in")

    async def test() -> None:
        async with engine() as (server, client):
            slots = slots_for(await client.load(model, "bfloat16"), client)
            opened: list[str] = []
            open_attachment = server._open

            def opening(attach: Attach) -> Attachment:
                opened.append(attach.worker)
                return open_attachment(attach)

            monkeypatch.setattr(server, "_open", opening)
            with monkeypatch.context() as patch:
                patch.setattr("copyengine.server.ledger.owned", owned)
                with pytest.raises(ConfigError, match="no directory"):
                    await client.attach(slots.attach_request)
            assert not opened
            await client.attach(slots.attach_request)
            slots.close()

    run(test(), "selector")


def test_the_end_of_the_copy_loop_ends_the_server(model: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        server = CopyEngineServer(CopyEngineConfig(), context)
        server.bind()
        running = asyncio.create_task(server.run())
        await asyncio.sleep(0.01)
        server._copier._calls.append(lambda: 1 / 0)  # type: ignore[arg-type]
        server._copier.wake()
        with pytest.raises(PeerDied, match="copy loop"):
            await running
        assert not await server.close()
        context.term()

    run(test(), "selector")


def test_a_socket_that_hears_nothing_any_more_ends_the_server_with_its_error() -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        server = CopyEngineServer(CopyEngineConfig(), context)

        async def deaf() -> None:
            raise zmq.ZMQError(zmq.ENOTSOCK)

        server._rpc.serve = deaf  # type: ignore[method-assign]
        with pytest.raises(zmq.ZMQError):
            await asyncio.wait_for(server.run(), 20)
        assert await server.close()
        context.term()

    in_both_loops(test)


def test_a_process_that_ends_by_an_error_says_so_by_its_code_also_if_a_copy_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[int] = []
    free = CopyEngineServer.close

    async def deaf(_: CopyEngineServer) -> None:
        raise zmq.ZMQError(zmq.ENOTSOCK)

    async def close(server: CopyEngineServer) -> bool:
        assert await free(server)
        return False

    monkeypatch.setattr(CopyEngineServer, "run", deaf)
    monkeypatch.setattr(CopyEngineServer, "close", close)
    monkeypatch.setattr("copyengine.__main__.end_now", codes.append)

    async def test() -> None:
        with pytest.raises(zmq.ZMQError):
            await serve(CopyEngineConfig())

    in_both_loops(test)
    assert codes == [1] * len(LOOPS)


def test_banks_that_may_be_copied_from_are_not_freed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the file's records, after a close with a copy in flight; it says so, and the process is to end."""

    async def test() -> None:
        async with engine() as (server, client):
            await client.load(model, "bfloat16")
            banks = server._loader.banks
            assert banks is not None
            stop = server._copier.stop
            monkeypatch.setattr(server._copier, "stop", lambda: False)
            assert not await server.close()
            for bank, records in zip(banks.records, expected_records(model), strict=True):
                assert np.array_equal(bank, records)
            monkeypatch.setattr(server._copier, "stop", stop)

    run(test(), "selector")


# The process ---------------------------------------------------------------------------------------------------------


class Process:
    """`python -m copyengine`, with the events it announced until it was ready."""

    def __init__(self, *flags: str, module: tuple[str, ...] = ("copyengine",)) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", *module, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.popen.stdout is not None
        self.events = [parse_event(self.popen.stdout.readline()) for _ in range(2)]

    @property
    def endpoint(self) -> str:
        assert isinstance(self.events[0], Listening) and isinstance(self.events[1], Ready)
        return self.events[0].endpoint

    def end(self) -> tuple[int, str]:
        """Its exit code and what it wrote to standard error."""
        _, stderr = self.popen.communicate(timeout=30)
        return self.popen.returncode, stderr.decode()


@pytest.mark.parametrize("event_loop", LOOPS)
def test_steps_over_a_process_that_is_shut_down(model: str, ledger: Path, event_loop: EventLoop) -> None:
    process = Process("--event-loop", event_loop, "--log-level", "warning")

    async def test() -> None:
        context = zmq.asyncio.Context()
        client = CopyEngineClient(context, process.endpoint)
        await serve_steps(client, model)
        await client.shutdown()
        await client.close()
        context.term()

    run(test(), event_loop)
    assert process.end() == (0, "") and entries(ledger) == []


@pytest.mark.parametrize("event_loop", LOOPS)
@pytest.mark.parametrize("how", ["end of input", "SIGTERM", "SIGINT", "killed"])
def test_however_it_ends_nothing_stays(model: str, ledger: Path, event_loop: EventLoop, how: str) -> None:
    """Banks are loaded and a worker is attached. Killed, it leaves segments, which the next start removes."""
    flags = ["--parent-pipe"] if how == "end of input" else []
    process = Process("--event-loop", event_loop, "--log-level", "warning", *flags)

    async def test() -> None:
        context = zmq.asyncio.Context()
        client = CopyEngineClient(context, process.endpoint)
        slots = slots_for(await client.load(model, "bfloat16"), client)
        await client.attach(slots.attach_request)
        assert len(entries(ledger)) == 2 + 3
        await asyncio.to_thread(stop)
        await asyncio.wait_for(client.lost.wait(), 10)
        slots.close()
        await client.close()
        context.term()

    def stop() -> None:
        if how == "end of input":
            assert process.popen.stdin is not None
            process.popen.stdin.close()
            process.popen.stdin = None
        elif how == "killed":
            process.popen.kill()
        else:
            os.kill(process.popen.pid, signal.Signals[how])

    run(test(), event_loop)
    code, stderr = process.end()
    assert stderr == "" and code == (0 if how != "killed" else -signal.SIGKILL)
    if how == "killed":
        assert len(entries(ledger)) == 2
        after = Process("--parent-pipe")
        assert entries(ledger) == [] and isinstance(after.events[1], Ready)
        assert after.end()[0] == 0
    assert entries(ledger) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals to send")
@pytest.mark.parametrize("process", ["copyengine", "worker"])
def test_a_read_that_is_stuck_holds_up_no_stop(model: str, ledger: Path, process: str) -> None:
    """Alone, with a SIGTERM in the middle of the load; the worker has its copy engine as a thread."""
    running = Process("--log-level", "warning", module=("tests.copyengine.stuck_reader", process))

    async def test() -> None:
        context = zmq.asyncio.Context()
        if process == "copyengine":
            client: CopyEngineClient | WorkerClient = CopyEngineClient(context, running.endpoint)
            load = asyncio.create_task(client.load(model, "bfloat16"))  # type: ignore[arg-type]
        else:
            client = WorkerClient(context, running.endpoint)
            load = asyncio.create_task(client.load(WorkerLoad(model), 30))
        async with asyncio.timeout(60):
            while not (ledger / "reading").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        os.kill(running.popen.pid, signal.SIGTERM)
        with pytest.raises(PeerDied):
            await load
        await client.close()
        context.term()

    try:
        run(test(), "selector")
        start = time.monotonic()
        code, stderr = running.end()
    finally:
        running.popen.kill()
    assert code == 0 and "a read may be stuck" in stderr
    assert time.monotonic() - start < 25
    assert entries(ledger) == []


@pytest.mark.skipif(bool(cuda_devices()), reason="there is a GPU here")
def test_no_gpu_is_one_clear_line() -> None:
    process = Process("--device", "cuda")
    code, stderr = process.end()
    assert code == 2 and "--device cpu" in stderr and stderr.count("\n") == 1
    assert isinstance(process.events[0], StartFailed) and process.events[0].code == "config"


def test_a_wrong_setting_is_one_clear_line() -> None:
    for flags, what in [(["--spin-us", "-1"], "--spin-us"), (["--endpoint", "tcp://0.0.0.0:0"], "loopback")]:
        process = Process(*flags)
        code, stderr = process.end()
        assert code == 2 and what in stderr and stderr.count("\n") == 1
        assert isinstance(process.events[0], StartFailed) and process.events[0].code == "config"


def test_an_idle_process_sleeps(model: str) -> None:
    """With banks and a worker attached that runs no step: no ring is polled."""
    process = Process("--parent-pipe", "--log-level", "warning")

    async def test() -> None:
        context = zmq.asyncio.Context()
        client = CopyEngineClient(context, process.endpoint)
        await serve_steps(client, model)
        async with asyncio.timeout(10):
            while not (await client.stats()).asleep:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await client.close()
        context.term()

    run(test(), "selector")
    assert process.end() == (0, "")
