"""The slot pool of one worker on a GPU: admission, waiting and ringing happen in the compute stream, in order.

The host enqueues a step and looks at its outcome once, at the end (`collect`): which experts a layer routes to, which
of them are missing and which slots they get, the host never learns. A flag is 0 exactly while its query is under way,
so that all flags are up between two steps.

Failure: a query that did not land has its flag above LANDED, which a later launch or the end of the step notices; the
step then fails as a whole, and every slot that it used is forgotten. `release` raises the error word, from which on the
device rings nothing, and all flags, again and again until the step is over: a launch that was already past its look at
the word clears a flag once more.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from copyengine.device import CLEARED, LANDED, RELEASED, OnBytes
from copyengine.device.cuda_driver import CudaError
from copyengine.device.host import Segment, create_segment
from copyengine.protocol import Attach, MemoryHandle
from copyengine.ring import RingWriter, ring_nbytes
from copyengine.sync import nap
from copyengine.wire.errors import CopyFailed, PeerDied, PeerTimeout, SlotstreamError
from kernels import admit
from kernels.flag_wait import spin_until_set
from kernels.formats import RecordLayout
from worker.expert_stats import MODES, add
from worker.geometry import SlotGeometry
from worker.layer_rows import LayerRows
from worker.protocol import ExpertStats, Mode

END_S = 10.0
"""Seconds that the device may take to end a step after a release: its GEMMs, without any copy."""

RELEASE_EVERY_S = 2e-3
"""Between two rounds of raising the flags of a released pool while its last step ends."""

log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """A run of device memory that another process can open."""

    @property
    def address(self) -> int: ...

    @property
    def handle(self) -> MemoryHandle: ...

    def close(self) -> None: ...


class MappedRing(Protocol):
    """A ring that the device can write."""

    @property
    def address(self) -> int: ...

    def close(self) -> None: ...


class Device(Protocol):
    """What is needed of copyengine.device.cuda_worker.CudaWorkerDevice."""

    @property
    def has_stream_waits(self) -> bool: ...

    def allocate(self, nbytes: int, on_bytes: OnBytes | None = None) -> DeviceMemory: ...

    def map_ring(self, ring: Segment) -> MappedRing: ...

    def wait_flag(self, stream: int, address: int) -> None: ...

    def write_words(self, address: int, value: int, count: int) -> None: ...

    def read_words(self, address: int, count: int) -> list[int]: ...


class Stream(Protocol):
    """The compute stream: torch's current one on a GPU."""

    def handle(self) -> int:
        """What the driver calls it."""
        ...

    def mark(self) -> Callable[[], bool] | None:
        """Tells whether all that the stream was given so far is done; None while a graph is being captured."""
        ...

    def synchronize(self) -> None:
        """Wait until all that the stream was given is done."""
        ...


class DeviceSlots:
    """Pool, flags, ring and residency tables of one worker; see worker.model.moe.Experts and worker.step.StepExperts.

    One thread runs steps; `release`, `stats`, `resident` may be called from others.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        tensor_of: Callable[[DeviceMemory, int], torch.Tensor],
        run_id: str,
        worker: str,
        geometry: SlotGeometry,
        layout: RecordLayout,
        wake: Callable[[], None],
        deadline_s: float = 30.0,
        on_release: Callable[[str], None] = lambda _: None,
        on_bytes: OnBytes | None = None,
    ) -> None:
        """Allocates pool, flags and ring, all or none; ConfigError if there is not enough memory.

        `tensor_of(memory, nbytes)` is device memory as [nbytes] uint8. `wake`, `on_release`, `on_bytes` as for
        worker.slots.ExpertSlots. No layer's copies are waited for longer than `deadline_s`, nor those of a whole step
        that runs as one graph.
        """
        self.geometry = geometry
        self._worker = worker
        self._device = device
        self._stream = stream
        self._layout = layout
        self._wake = wake
        self._deadline_s = deadline_s
        self._on_release = on_release
        self._why_released: str | None = None
        self._mode: Mode | None = None
        self._totals = {mode: ExpertStats() for mode in MODES}
        self._step = ExpertStats()
        self._resident = 0
        self._marks: list[Callable[[], bool]] = []  # the ends of the step's layers
        queries = admit.most_queries(geometry.experts, geometry.slots, geometry.max_query)
        self._num_flags = queries + geometry.stream_groups
        capacity = 1 << (self._num_flags - 1).bit_length()  # never full: a flag has one query under way
        closing: list[Callable[[], None]] = []
        try:
            pool_nbytes = geometry.pool_slots * geometry.record_nbytes
            self._pool = device.allocate(pool_nbytes, on_bytes)
            closing.append(self._pool.close)
            self._flags = device.allocate(4 * self._num_flags)
            closing.append(self._flags.close)
            self._ring = create_segment(run_id, f"{worker}-ring", ring_nbytes(capacity))
            closing.append(self._ring.close)
            self._writer = RingWriter(self._ring.array, capacity)
            self._mapped = device.map_ring(self._ring)
            closing.append(self._mapped.close)
            self.pool = tensor_of(self._pool, pool_nbytes).view(geometry.pool_slots, geometry.record_nbytes)
            flags = tensor_of(self._flags, 4 * self._num_flags).view(torch.int32)
            self._make_tables(flags, queries, capacity)
        except BaseException:
            for close in reversed(closing):
                close()
            raise

    def _make_tables(self, flags: torch.Tensor, queries: int, capacity: int) -> None:
        geometry, where = self.geometry, flags.device
        flags.fill_(LANDED)
        self._state = admit.new_state(geometry.layers, geometry.experts, geometry.slots, where)
        self._admission = admit.new_device_admission(
            self._state, flags[:queries], self._mapped.address, capacity, geometry.max_query
        )
        self._streaming = admit.new_device_stream(
            self._state,
            self._admission,
            flags[queries:],
            first_flag=queries,
            first_slot=geometry.slots,
            group_slots=geometry.group_slots,
            groups=geometry.stream_groups,
        )
        self._flag_words = flags
        self._clock_before = self._state.clock.clone()
        self._counted = [0] * 5  # of the admission, then of the streaming, when the last step ended

    @property
    def attach_request(self) -> Attach:
        """What the copy engine must be told before the first step."""
        return Attach(self._worker, self._pool.handle, self._flags.handle, self._ring.handle, self.geometry.pool_slots)

    @property
    def tables(self) -> admit.AdmissionState:
        """What is in which slot, on the device."""
        return self._state

    @property
    def decode_routing(self) -> torch.Tensor:
        """[L, E] int64: in how many decode steps each expert was routed to. Prefill does not count."""
        return self._admission.routing.cpu()

    def stats(self) -> dict[Mode, ExpertStats]:
        """Counters since the start, per mode; the running step's are not in it."""
        return dict(self._totals)

    def resident(self) -> int:
        """Cache slots that held an expert when the last step ended."""
        return self._resident

    # A step ------------------------------------------------------------------------------------------------------

    def begin_step(self, mode: Mode) -> None:
        """Start a step. A streamed one requests its first parts right away. PeerDied after a release."""
        assert self._mode is None, "the step before has not ended"
        self._check()
        if self._writer.begin_step():
            self._wake()
        self._mode = mode
        self._step = ExpertStats()
        self._marks = []
        self._begin(mode)

    def _begin(self, mode: Mode) -> None:
        self._clock_before.copy_(self._state.clock)
        if mode == "streamed":
            for number in range(self.geometry.stream_groups):
                self._request(number)

    @contextmanager
    def rehearsal(self, mode: Mode) -> Iterator[None]:
        """A step inside it rings for nothing, waits for nothing and computes nothing true; it leaves no trace.

        Only as long as nothing is resident.
        """
        self._admission.control[admit.ERROR] = 1
        self._mode = mode
        try:
            self._begin(mode)
            yield
            self._stream.synchronize()
        finally:
            self._mode = None
            self._marks.clear()
            self._reset()

    def __call__(self, layer: int, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See worker.model.moe.Experts. Nothing in it waits for the device or takes a value from it."""
        rows = LayerRows(self._layout, self.geometry.experts, x, weights, experts)
        if self._mode == "streamed":
            self._streamed(layer, rows)
        else:
            self._on_demand(layer, rows)
        out = rows.combined()
        self._mark()
        return out

    def _on_demand(self, layer: int, rows: LayerRows) -> None:
        geometry, admission = self.geometry, self._admission
        most = min(rows.routes, geometry.experts)
        launches = admit.launches(geometry.experts, geometry.slots, geometry.max_query, most)
        for query in range(admit.most_queries(most, geometry.slots, geometry.max_query)):
            if query < launches:
                decodes = self._mode == "decode"
                admit.admit_layer(self._state, admission, layer, rows.offsets, query, count_routing=decodes)
            self._wait(query)
            rows.compute(
                self.pool, admission.table, admission.spans[query], most if launches > 1 else geometry.max_query
            )

    def _streamed(self, layer: int, rows: LayerRows) -> None:
        geometry = self.geometry
        for part in range(self._streaming.parts):
            number = layer * self._streaming.parts + part
            turn = number % geometry.stream_groups
            self._wait(self._admission.flags.numel() + turn)
            rows.compute(self.pool, self._streaming.tables[turn], self._streaming.spans[part], geometry.group_slots)
            self._request(number + geometry.stream_groups)

    def _request(self, number: int) -> None:
        """Ring part `number` of the step, if there is one: its stream slots are free when the stream comes here."""
        layer, part = divmod(number, self._streaming.parts)
        if layer < self.geometry.layers:
            turn = number % self.geometry.stream_groups
            admit.request_part(self._state, self._admission, self._streaming, layer, part, turn)

    def _wait(self, flag: int) -> None:
        if self._device.has_stream_waits:
            self._device.wait_flag(self._stream.handle(), self._flags.address + 4 * flag)
        else:
            spin_until_set(self._flag_words, flag)

    def collect(self, tokens: torch.Tensor) -> list[int]:
        """See worker.step.StepExperts: the end of the step, and what came of it.

        CopyFailed, PeerTimeout, PeerDied: then the step must be aborted.
        """
        control = self._admission.control.to(torch.int64)
        flags = self._flag_words.max().to(torch.int64).reshape(1)
        resident = (self._state.owner != admit.ABSENT).sum().reshape(1)
        counters = [self._admission.stats, self._streaming.stats]
        values = _to_host(torch.cat([control, flags, resident, *counters, tokens]))
        self._mark()
        self._await()
        words = values.tolist()
        outcome, words = words[: len(control)], words[len(control) :]
        (highest, self._resident), words = words[:2], words[2:]
        self._step = self._since(words[: len(self._counted)])
        self._check()
        if outcome[admit.FAILED] or highest > LANDED:
            raise CopyFailed("experts of this step did not land")
        if outcome[admit.ERROR]:
            raise PeerTimeout("the copy engine took no query from its full ring")
        return words[len(self._counted) :]

    def end_step(self) -> ExpertStats:
        """End a step that has been collected; its counters."""
        self._finish()
        return self._step

    def abort_step(self) -> None:
        """End a step that failed: every slot that it used is forgotten. Does nothing if no step runs.

        The traffic of the step is counted, the step is not.
        """
        if self._mode is None:
            return
        try:
            self._mark()
            self._await()
            self._await_flags()
            self._forget_step()
            counters = torch.cat([self._admission.stats, self._streaming.stats]).tolist()
            self._step = add(self._step, self._since(counters))
        except SlotstreamError as error:
            log.error("a failed step did not end: %s", error)
        except (RuntimeError, CudaError) as error:  # of the device, after which it does nothing more
            self.release(f"the device does not work any more: {error}")
        self._step = add(self._step, ExpertStats(steps=-self._step.steps))
        self._finish()

    def release(self, why: str) -> None:
        """The copy engine is gone: end every wait; from now on all raises PeerDied(why). From any thread."""
        if self._why_released is not None:
            return
        self._why_released = why
        self._raise_all()
        threading.Thread(target=self._raise_until_over, name="release", daemon=True).start()
        self._on_release(why)

    def close(self) -> None:
        """Free pool, flags and ring."""
        for part in (self._mapped, self._ring, self._flags, self._pool):
            part.close()

    # Waiting and failing ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._why_released is not None:
            raise PeerDied(self._why_released)

    def _mark(self) -> None:
        mark = self._stream.mark()
        if mark is not None:
            self._marks.append(mark)

    def _await(self) -> None:
        """Wait for all marks of the step, `deadline_s` for each; after a release END_S for all of them."""
        for mark in self._marks:
            start = time.monotonic()
            while not mark():
                waited = time.monotonic() - start
                if self._why_released is not None and waited > END_S:
                    raise PeerTimeout(f"the device has not ended its step {END_S:g} s after the release")
                if waited > self._deadline_s:
                    self.release(f"the copy engine did not finish a layer's copies within {self._deadline_s:g} s")
                nap(waited)
        self._marks.clear()

    def _await_flags(self) -> None:
        """Wait until no query is under way: a step that ended early has rung for more than it waited for."""
        start = time.monotonic()
        while self._why_released is None and CLEARED in self._device.read_words(self._flags.address, self._num_flags):
            waited = time.monotonic() - start
            if waited > self._deadline_s:
                self.release(f"the copy engine did not finish a failed step's copies within {self._deadline_s:g} s")
            nap(waited)

    def _forget_step(self) -> None:
        """Forget what the slots hold that were used since the step began, and that it failed."""
        state = self._state
        used = state.last_used > self._clock_before
        owners = state.owner[used & (state.owner != admit.ABSENT)].long()
        state.slot_of.view(-1)[owners] = admit.ABSENT
        state.owner[used] = admit.ABSENT
        state.last_used[used] = admit.FREE
        self._admission.control[admit.FAILED] = 0
        self._flag_words.fill_(LANDED)
        self._resident = int((state.owner != admit.ABSENT).sum())

    def _reset(self) -> None:
        """As made: nothing resident, nothing counted, nothing failed."""
        state, admission = self._state, self._admission
        for table, empty in ((state.slot_of, admit.ABSENT), (state.owner, admit.ABSENT), (state.last_used, admit.FREE)):
            table.fill_(empty)
        for counters in (state.clock, admission.routing, admission.stats, self._streaming.stats):
            counters.zero_()
        for word in (admit.ERROR, admit.FAILED):
            admission.control[word] = 0
        self._flag_words.fill_(LANDED)

    def _raise_all(self) -> None:
        control = self._admission.control
        self._device.write_words(control.data_ptr() + 4 * admit.ERROR, 1, 1)
        self._device.write_words(self._flags.address, RELEASED, self._num_flags)

    def _raise_until_over(self) -> None:
        try:
            while self._mode is not None:
                time.sleep(RELEASE_EVERY_S)
                self._raise_all()
        except Exception as error:  # the outermost edge of this thread; the device is gone, and what waited on it
            log.error("the flags cannot be raised any more: %s", error)

    def _finish(self) -> None:
        assert self._mode is not None, "no step has begun"
        self._writer.end_step()
        self._totals[self._mode] = add(self._totals[self._mode], self._step)
        self._mode = None

    def _since(self, counted: list[int]) -> ExpertStats:
        """What the counters say of this step."""
        hits, misses, _, streamed_hits, streamed_misses = (
            now - before for now, before in zip(counted, self._counted, strict=True)
        )
        self._counted = counted
        hits, misses = hits + streamed_hits, misses + streamed_misses
        return ExpertStats(1, hits + misses, hits, misses, misses * self.geometry.record_nbytes)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """`values` on the host, once the stream has come there."""
    if values.device.type == "cpu":
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
