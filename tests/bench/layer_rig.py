"""The real parts that one MoE layer runs on: a copy engine in a process of its own, and here a worker's slots."""

import asyncio
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import zmq.asyncio

from copyengine.client import CopyEngineClient
from copyengine.config import CopyEngineConfig
from copyengine.protocol import StatsReply
from copyengine.wire import cli
from copyengine.wire.child import Child, Exited, Notices, Said
from copyengine.wire.lifecycle import Listening, StartFailed
from kernels import admit
from kernels.formats import RecordLayout, layout
from tests.bench.flash_next import write_flash_next
from worker.backend import PoolOrder
from worker.building import copy_checks
from worker.cuda_backend import CudaBackend
from worker.device_slots import DeviceSlots
from worker.geometry import SlotGeometry
from worker.protocol import Mode

T = TypeVar("T")
LISTEN_S = 30.0
LOAD_S = 120.0
CALL_S = 20.0
COPY_DEADLINE_S = 10.0


class Routing(NamedTuple):
    """What a layer is given, and which experts that is."""

    x: torch.Tensor  # [T, H]
    weights: torch.Tensor  # [T, K] float32
    experts: torch.Tensor  # [T, K] int32
    distinct: list[int]


class CopyEngine:
    """`python -m copyengine` whose banks hold made-up experts, and a client of it on an event loop of its own."""

    def __init__(self, layers: int, device: str = "cuda", small: bool = False, checksums: bool = False) -> None:
        """`layers` banks in Flash-Next's geometry, or in a small one. Raises what the copy engine answers.

        With `checksums` its pools verify what is copied.
        """
        self.run_id = f"bench{secrets.token_hex(4)}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client", daemon=True)
        self._thread.start()
        notices: Notices = queue.SimpleQueue()
        config = CopyEngineConfig(run_id=self.run_id, device="cuda" if device == "cuda" else "cpu", parent_pipe=True)
        self._child = Child("copyengine", "copyengine", cli.to_argv(config), notices)
        try:
            endpoint = _endpoint(notices)
            self._context = zmq.asyncio.Context()
            self._client = self.call(_connect(self._context, endpoint), CALL_S)
            with tempfile.TemporaryDirectory() as directory:
                sizes = write_flash_next(Path(directory), layers, small=small)
                how: dict[str, Any] = {"deadline_s": LOAD_S, "load_format": "dummy", "checksums": checksums}
                loading = self._client.load(directory, "bfloat16", **how)
                self.loaded = self.call(loading, LOAD_S)
        except BaseException:
            self._child.stop()
            raise
        self.layers, self.experts, self.k = layers, sizes.experts, sizes.experts_per_token
        self.record: RecordLayout = layout("nvfp4", sizes.hidden, sizes.intermediate)
        assert self.loaded.record_nbytes == self.record.record_nbytes

    def call(self, work: Coroutine[Any, Any, T], within_s: float = CALL_S) -> T:
        """What `work` returns or raises, on the client's loop."""
        return self._spawn(work).result(within_s)

    def wake(self, worker: str) -> None:
        """As a step calls it: nobody waits for it."""
        self._spawn(self._client.wake(worker))

    def attach(self, slots: DeviceSlots) -> None:
        """Have them served."""
        self.call(self._client.attach(slots.attach_request))

    def detach(self, worker: str) -> None:
        """Have a worker's slots forgotten."""
        self.call(self._client.detach(worker))

    def stats(self) -> StatsReply:
        """The copy engine's counters."""
        return self.call(self._client.stats())

    def close(self) -> None:
        """End the process and the client."""
        self.call(self._client.close())
        self._context.term()
        self._child.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class Pool:
    """A worker's slots, which the copy engine serves."""

    def __init__(self, engine: CopyEngine, backend: CudaBackend, geometry: SlotGeometry) -> None:
        self.geometry = geometry
        self.device = backend.device
        self.released: list[str] = []
        self._engine = engine
        self._name = f"w{secrets.token_hex(4)}"
        order = PoolOrder(
            engine.run_id,
            self._name,
            geometry,
            engine.record,
            lambda: engine.wake(self._name),
            COPY_DEADLINE_S,
            self.released.append,
            lambda _: None,
            checks=copy_checks(engine.loaded, geometry),
        )
        self.slots, _ = backend.make_slots(order)
        self.slots.pool.fill_(0xFF)  # what nobody copies is no number
        self._nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
        x = torch.zeros(1, engine.record.hidden, dtype=torch.bfloat16, device=self.device)
        expert = torch.zeros(1, 1, dtype=torch.int32, device=self.device)
        self._one = x, torch.zeros(1, 1, device=self.device), expert  # a token and its only expert
        engine.attach(self.slots)

    def awaken(self) -> None:
        """Have one record copied, after which the copy engine looks at the ring without pause for some milliseconds.

        What is resident stays resident, what is missing is missing again.
        """
        last = self.geometry.layers - 1
        resident = bool(self.slots.tables.slot_of[last, 0] >= 0)
        self.forget(last, [0])
        with self.step("demand"):
            self.slots(last, *self._one)
        if not resident:
            self.forget(last, [0])

    @contextmanager
    def step(self, mode: Mode) -> Iterator[None]:
        """A step; all that it was given is done after it, or it is aborted."""
        try:
            self.slots.begin_step(mode)
            yield
            self.slots.collect(self._nothing)
            self.misses = self.slots.end_step().misses
        except BaseException:
            self.slots.abort_step()
            raise

    def fill(self, k: int) -> None:
        """Make every expert of every layer resident; there must be a slot for each."""
        experts = self.geometry.experts
        tokens = -(-experts // k)
        chosen = (torch.arange(tokens * k, dtype=torch.int32) % experts).view(tokens, k).to(self.device)
        x = torch.zeros(tokens, self._engine.record.hidden, dtype=torch.bfloat16, device=self.device)
        weights = torch.zeros(tokens, k, device=self.device)
        with self.step("demand"):
            for layer in range(self.geometry.layers):
                self.slots(layer, x, weights, chosen)
        assert bool((self.slots.tables.slot_of >= 0).all())

    def forget(self, layer: int, experts: list[int]) -> None:
        """Make room: these experts are missing from now on."""
        if experts:
            admit.invalidate(self.slots.tables, layer, torch.tensor(experts, device=self.device))

    def close(self) -> None:
        """Give the memory back."""
        self._engine.detach(self._name)
        self.slots.close()


def _endpoint(notices: Notices) -> str:
    end = time.monotonic() + LISTEN_S
    while True:
        match notices.get(timeout=max(0.0, end - time.monotonic())):
            case Said(event=Listening(endpoint=endpoint)):
                return endpoint
            case Said(event=StartFailed(detail=detail)):
                raise RuntimeError(f"the copy engine does not start: {detail}")
            case Exited(code=code):
                raise RuntimeError(f"the copy engine ended with exit code {code}")


async def _connect(context: zmq.asyncio.Context, endpoint: str) -> CopyEngineClient:
    return CopyEngineClient(context, endpoint)
