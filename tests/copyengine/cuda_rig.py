"""A copy engine process for GPUs and the worker's end of its data plane, used from plain code; no torch.

For tests/copyengine/test_cuda.py and tests/bench/bench_copies.py.
"""

import asyncio
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import zmq.asyncio

from copyengine.client import CopyEngineClient
from copyengine.device.cuda_driver import Driver, load_driver
from copyengine.device.cuda_worker import CudaWorkerDevice, DeviceMemory
from copyengine.device.host import create_segment
from copyengine.protocol import Attach, Loaded, LoadProgress
from copyengine.ring import CopyQuery, Kind, RingWriter, ring_nbytes
from copyengine.wire.lifecycle import Listening, Ready, parse_event

T = TypeVar("T")
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
CAPACITY = 64
WAIT_S = 20.0


class Connection:
    """A client of a copy engine, and an event loop that runs while it is used."""

    def __init__(self, endpoint: str, context: zmq.asyncio.Context | None = None) -> None:
        """Without a `context` one of its own."""
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._own_context = zmq.asyncio.Context() if context is None else None
        shared = self._own_context or context
        assert shared is not None

        async def connect() -> CopyEngineClient:
            return CopyEngineClient(shared, endpoint)

        self.client = self.run(connect())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns."""
        return self._runner.run(work)

    def load(self, model: str, on_progress: Callable[[LoadProgress], None] = lambda _: None, **more: Any) -> Loaded:
        """As bfloat16."""
        return self.run(self.client.load(model, "bfloat16", on_progress=on_progress, **more))

    def close(self) -> None:
        """Disconnect."""
        self.run(self.client.close())
        if self._own_context is not None:
            self._own_context.term()
        self._runner.close()


class CudaEngine(Connection):
    """`python -m copyengine --device cuda`, and a client of it. Usable as a context manager."""

    def __init__(self, *flags: str, start: Sequence[str] = ("-m", "copyengine")) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *start, "--device", "cuda", "--parent-pipe", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.popen.stdout is not None
        listening, ready = (parse_event(self.popen.stdout.readline()) for _ in range(2))
        assert isinstance(listening, Listening) and isinstance(ready, Ready), (listening, ready)
        super().__init__(listening.endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        _, stderr = self.popen.communicate(timeout=60)
        if kind is None:
            assert self.popen.returncode == 0, stderr

    def kill(self) -> None:
        """As by the system: at once."""
        self.popen.kill()
        self.popen.communicate(timeout=60)


class CudaWorker:
    """The pool, flags and ring of one worker, rung by the host as a kernel would."""

    def __init__(
        self, name: str, record_nbytes: int, slots: int, flags: int, ordinal: int = 0, local: bool = False
    ) -> None:
        self.name = name
        self.slots = slots
        self.record_nbytes = record_nbytes
        self.flag_count = flags
        self.device = CudaWorkerDevice(ordinal, local)
        self.pool = self.device.allocate(slots * record_nbytes)
        self.flags = self.device.allocate(4 * flags)
        self.ring = create_segment("test", f"{name}-ring", ring_nbytes(CAPACITY))
        self.mapped = self.device.map_ring(self.ring)
        self.writer = RingWriter(self.ring.array, CAPACITY)
        self.stream: Any = self.device._driver.stream()
        self.event: Any = self.device._driver.event()

    @property
    def request(self) -> Attach:
        """What the copy engine must be told."""
        return Attach(self.name, self.pool.handle, self.flags.handle, self.ring.handle, self.slots)

    def attach(self, engine: Connection) -> None:
        """Have the ring served, as in one step that goes on until the end."""
        engine.run(engine.client.attach(self.request))
        if self.writer.begin_step():
            engine.run(engine.client.wake(self.name))

    def put(self, flag: int, kind: Kind, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Ring one query, its flag cleared."""
        self.device.write_words(self.flag_address(flag), 0, 1)
        self.writer.put(CopyQuery(flag, kind, layer, tuple(experts), tuple(slots)), WAIT_S, lambda: None)

    def flag_address(self, index: int) -> int:
        """Of one flag."""
        return self.flags.address + 4 * index

    def flag_values(self) -> list[int]:
        """All flags."""
        return self.device.read_words(self.flags.address, self.flag_count)

    def wait(self, *flags: int) -> list[int]:
        """Their values once none of them is 0. TimeoutError after WAIT_S."""
        end = time.monotonic() + WAIT_S
        while True:
            values = self.flag_values()
            if all(values[flag] for flag in flags):
                return [values[flag] for flag in flags]
            if time.monotonic() > end:
                raise TimeoutError(f"flags {flags} are {[values[flag] for flag in flags]}")

    def fill_pool(self, byte: int) -> None:
        """Every byte of the pool."""
        self.device.write_words(self.pool.address, byte * 0x01010101, self.pool.nbytes // 4)

    def close(self) -> None:
        """Free all of it."""
        self.device._gpu.enter()
        self.device._driver.destroy_event(self.event)
        self.device._driver.destroy_stream(self.stream)
        self.mapped.close()
        self.ring.close()
        self.pool.close()
        self.flags.close()
        self.device.close()


class Download:
    """Reads device memory to the host."""

    def __init__(self, device: CudaWorkerDevice, nbytes: int) -> None:
        """Up to `nbytes` at a time."""
        self.driver: Driver = load_driver()
        device._gpu.enter()
        self._stream, self._event = self.driver.stream(), self.driver.event()
        self._buffer = self.driver.allocate_host(nbytes)

    def __call__(self, memory: DeviceMemory) -> Bytes:
        """All of it."""
        self.driver.copy_to_host(self._buffer, memory.address, memory.nbytes, self._stream)
        self.driver.record(self._event, self._stream)
        while not self.driver.has_happened(self._event):
            time.sleep(0)
        return np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(self._buffer)).copy()

    def close(self) -> None:
        """Free the buffer."""
        self.driver.free_host(self._buffer)
        self.driver.destroy_event(self._event)
        self.driver.destroy_stream(self._stream)
