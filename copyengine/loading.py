"""Carries out Load: once, in a thread, however many clients ask for it, telling each of them how far it is."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import NamedTuple

from copyengine.banks import Banks
from copyengine.checkpoint.dummy import fill_dummy_experts
from copyengine.checkpoint.input_scales import made_up_scales, read_input_scales
from copyengine.checkpoint.model import Model, expert_file_nbytes, open_model
from copyengine.checkpoint.reader import read_experts
from copyengine.checksums import bank_sums, packed
from copyengine.device import CopyDevice
from copyengine.protocol import Load, Loaded, LoadProgress
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError, RequestRefused
from copyengine.wire.logs import Log
from kernels.formats import RecordLayout

PROGRESS_S = 0.1
"""Between two progress replies at least."""

STOP_S = 2.0
"""Seconds that `close` waits for the loading thread, which may be stuck in a read from a disk that is gone."""

DUMMY_SEED = 0
"""Of experts that are made up: the same at every start."""

log = Log(__name__)


class Filled(NamedTuple):
    """Banks that hold the experts."""

    banks: Banks
    read_nbytes: int  # from files, for the records
    input_scales: list[tuple[float, float]]  # see protocol.Loaded, as the next
    checksums: bytes = b""


class BankLoader:
    """Holds the banks of the one model that this process serves."""

    def __init__(self, device: CopyDevice, run_id: str) -> None:
        self.banks: Banks | None = None
        self._device = device
        self._run_id = run_id
        self._request: Load | None = None
        self._task: asyncio.Task[Loaded] | None = None
        self._meter = _Meter()

    async def load(self, request: Load, tell: Callable[[LoadProgress], Awaitable[None]]) -> Loaded:
        """Load, join the load that runs, or say what is loaded.

        `tell` hears of the progress, at most every PROGRESS_S, and how far each phase was when it ended.
        ConfigError for a checkpoint or a machine that does not allow it, and for another model than the first one;
        after a failure any model may be tried.
        """
        if self._task is None:
            self._request = request
            self._meter = _Meter()
            self._task = asyncio.create_task(self._run(request, self._meter))
            self._task.add_done_callback(_retrieve)
        elif request != self._request:
            assert self._request is not None
            raise ConfigError(f"this copy engine holds {self._request.model}; start another one for {request.model}")
        task, meter, told = self._task, self._meter, list[LoadProgress]()
        over = task.done()
        while not over:
            await asyncio.wait({task}, timeout=PROGRESS_S)
            over = task.done()  # before the phases are looked at: what they say afterwards is final
            for at, progress in enumerate(list(meter.phases)):
                if told[at : at + 1] != [progress]:
                    told[at : at + 1] = [progress]
                    await tell(progress)
        return task.result()

    async def close(self, free_banks: bool = True) -> bool:
        """Stop a load that runs; free the banks, unless they are to be kept. False if the load has not stopped STOP_S
        later."""
        self._meter.stopping = True
        if self._task is not None and not self._task.done():
            _, running = await asyncio.wait({self._task}, timeout=STOP_S)
            if running:
                log.error("load_stuck", after_s=STOP_S, detail="a read may be stuck")
                return False
        if free_banks and self.banks is not None:
            self.banks.close()
            self.banks = None
        return True

    async def _run(self, request: Load, meter: "_Meter") -> Loaded:
        start = time.monotonic()
        try:
            filled = await asyncio.wrap_future(_start_load(self._device, self._run_id, request, meter))
        except BaseException:
            self._task = self._request = None
            raise
        self.banks = banks = filled.banks
        load_s = time.monotonic() - start
        log.info("experts_loaded", nbytes=banks.nbytes, pinned_nbytes=banks.pinned_nbytes, took_s=load_s)
        sizes = banks.record_nbytes, banks.layers, banks.experts, banks.nbytes, filled.read_nbytes
        return Loaded(*sizes, load_s, banks.pinned_nbytes, filled.input_scales, filled.checksums)


class _Meter:
    """How far the load is. Written by the loading threads, read by the event loop."""

    def __init__(self) -> None:
        self.phases: list[LoadProgress] = []  # how far each was when it ended; the last one runs
        self.stopping = False
        self._lock = threading.Lock()

    def start(self, phase: str, total_nbytes: int) -> None:
        """A phase begins."""
        self.phases.append(LoadProgress(phase, 0, total_nbytes))

    def add(self, nbytes: int) -> None:
        """`nbytes` more are done. RequestRefused, which ends the load, if the copy engine is stopping."""
        if self.stopping:
            raise RequestRefused("stopping", "the copy engine is stopping")
        with self._lock:
            old = self.phases[-1]
            self.phases[-1] = LoadProgress(old.phase, old.done_nbytes + nbytes, old.total_nbytes)


def _start_load(device: CopyDevice, run_id: str, request: Load, meter: _Meter) -> Future[Filled]:
    """What `_load` returns or raises. Its thread is a daemon: a process that ends does not wait for a stuck read.

    Banks that come after the future was cancelled are closed.
    """
    future: Future[Filled] = Future()

    def run() -> None:
        try:
            filled = _load(device, run_id, request, meter)
        except BaseException as error:  # goes to the caller, whatever it is
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(filled)
        else:
            filled.banks.close()

    threading.Thread(target=run, name="bank-loader", daemon=True).start()
    return future


def _load(device: CopyDevice, run_id: str, request: Load, meter: _Meter) -> Filled:
    """Fills banks. Runs in a thread."""
    model = open_model(request.model, request.hf_overrides, request.load_format, request.expert_activations)
    record, moe, layers = record_layout(model.spec, request.dtype), model.spec.moe, len(model.spec.moe_layers)
    if record is None or moe is None:
        return Filled(Banks(device, run_id, 0, 0, 0, meter.add), 0, [])
    meter.start("expert banks", layers * moe.experts * record.record_nbytes)
    banks = Banks(device, run_id, layers, moe.experts, record.record_nbytes, meter.add)
    try:
        filled = _fill(model, record, banks, request.load_format == "dummy", meter)
        if not request.checksums:
            return filled
        meter.start("checksums", banks.nbytes)
        return filled._replace(checksums=packed(bank_sums(banks.records, meter.add)))
    except BaseException:
        banks.close()
        raise


def _fill(model: Model, record: RecordLayout, banks: Banks, dummy: bool, meter: _Meter) -> Filled:
    """The experts of `model`, or made-up ones, into `banks`."""
    if dummy:
        meter.start("made-up experts", banks.nbytes)
        fill_dummy_experts(record, banks.records, DUMMY_SEED, meter.add)
        return Filled(banks, 0, made_up_scales(model.spec))
    meter.start("experts", expert_file_nbytes(model))
    read_nbytes = read_experts(model, record, banks.records, meter.add)
    return Filled(banks, read_nbytes, read_input_scales(model, meter.add))


def _retrieve(task: asyncio.Task[Loaded]) -> None:
    """The clients that asked may all be gone: nobody else looks at the failure."""
    if not task.cancelled():
        task.exception()
