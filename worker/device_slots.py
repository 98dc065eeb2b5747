"""The slot pool of one worker on a GPU: admission, waiting and ringing happen in the compute stream, in order.

The host enqueues a step and looks at its outcome once, at the end (`collect`): which experts a layer routes to, which
of them are missing and which slots they get, the host never learns. A flag is 0 exactly while its query is under way,
so that all flags are up between two steps.

Failure: a query that did not land has its flag above LANDED, which a later launch or the end of the step notices; the
step then fails as a whole, and every slot that it used is forgotten. Waiting and ending by force: worker.step_watch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from copyengine.device import LANDED, OnBytes
from copyengine.device.cuda_driver import CudaError
from copyengine.device.host import create_segment
from copyengine.protocol import Attach
from copyengine.ring import RingWriter, ring_nbytes
from copyengine.wire.errors import CopyFailed, RequestRefused, SlotstreamError
from copyengine.wire.logs import Log
from kernels import admit
from kernels.checksum import DAMAGE, RecordChecks, check_records, new_record_checks, slot_sums
from kernels.flag_wait import spin_until_set
from kernels.formats import RecordLayout
from kernels.grouped_gemm import InputScales
from worker.copy_checks import CopyChecks
from worker.expert_stats import Traffic, TrafficCounters, no_traffic
from worker.geometry import SlotGeometry
from worker.layer_rows import LayerRows
from worker.mailbox import COPY_DEADLINE_S
from worker.protocol import ExpertStats, LayerTraffic, Mode
from worker.routing_log import RoutingLog
from worker.step_device import Allocation, StepDevice, StepStream
from worker.step_watch import StepWatch

OUTCOME_WORDS = 6
"""Of a step, before its counters: see DeviceSlots._outcome."""

COUNTERS = len(admit.STATS) + len(admit.STREAM_STATS)
"""That the device keeps of each layer."""

log = Log(__name__)


class DeviceSlots:
    """Pool, flags, ring and residency tables of one worker; see worker.model.moe.Experts and worker.step.StepExperts.

    One thread runs steps; `release`, `stats`, `resident` may be called from others.
    """

    def __init__(
        self,
        device: StepDevice,
        stream: StepStream,
        tensor_of: Callable[[Allocation, int], torch.Tensor],
        run_id: str,
        worker: str,
        geometry: SlotGeometry,
        layout: RecordLayout,
        wake: Callable[[], None],
        deadline_s: float = COPY_DEADLINE_S,
        on_release: Callable[[str], None] = lambda _: None,
        on_bytes: OnBytes | None = None,
        input_scales: Sequence[InputScales] = (),
        checks: CopyChecks | None = None,
        fixed: bool = False,
    ) -> None:
        """Allocates pool, flags and ring, all or none; ConfigError if there is not enough memory.

        `tensor_of(memory, nbytes)` is device memory as [nbytes] uint8. `wake`, `on_release`, `on_bytes` as for
        host_slots.ExpertSlots, `input_scales` as for host_experts.HostExperts, `fixed` as for LayerRows. No layer's
        copies are waited for longer than `deadline_s`, nor those of a whole step that runs as one graph.
        """
        self.geometry = geometry
        self.checks = checks
        self._worker = worker
        self._device = device
        self._stream = stream
        self.layout = layout
        self._input_scales = input_scales
        self._fixed = fixed
        self._wake = wake
        self._mode: Mode | None = None
        self._counters = TrafficCounters(geometry.layers, geometry.record_nbytes)
        self._traffic = no_traffic(geometry.layers)  # of the running step
        self._counted = no_traffic(geometry.layers)  # by the device, when the last step ended
        self._resident = 0
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
            error_word = self._admission.control.data_ptr() + 4 * admit.ERROR
            where = (self._flags.address, self._num_flags)
            self._watch = StepWatch(device, stream, where, error_word, deadline_s, on_release)
        except BaseException:
            for close in reversed(closing):
                close()
            raise

    def _make_tables(self, flags: torch.Tensor, queries: int, capacity: int) -> None:
        geometry, where = self.geometry, flags.device
        flags.fill_(LANDED)
        self._state = admit.new_state(geometry.layers, geometry.experts, geometry.slots, where, geometry.half_life)
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
        self.log = RoutingLog(geometry.logged_steps, geometry.layers, geometry.experts, geometry.slots, where)
        self._routing_before = self._admission.routing.clone()
        self._flag_words = flags
        self._records = _record_checks(self.checks, where)
        self._damage = self._records.damage if self._records else flags.new_zeros(len(DAMAGE), dtype=torch.int64)
        self._clock_before = self._state.clock.clone()

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
        """[L, E] int64: in how many decode steps, failed ones too, each expert was routed to. Without prefill."""
        return self._admission.routing.cpu()

    def stats(self) -> dict[Mode, ExpertStats]:
        """Counters since the start, per mode; the running step's are not in it."""
        return self._counters.totals()

    def layer_stats(self) -> dict[Mode, LayerTraffic]:
        """The same by layer; on the thread that runs steps."""
        return self._counters.by_layer()

    def residency(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """See worker.backend.Slots."""
        held: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = (self._state.slot_of != admit.ABSENT).cpu().numpy()
        return held

    def verify(self) -> list[tuple[int, int]]:
        """See worker.backend.Slots."""
        assert self._records is not None
        held = self._state.slot_of.flatten()
        wrong = (held != admit.ABSENT) & (slot_sums(self._records, self.pool, held) != self._records.expected.flatten())
        return [divmod(pair, self.geometry.experts) for pair in wrong.nonzero().flatten().tolist()]

    def resident(self) -> int:
        """Cache slots that held an expert when the last step ended."""
        return self._resident

    def forget(self) -> None:
        """See worker.backend.Slots."""
        assert self._mode is None, "a step runs"
        admit.forget_all(self._state)
        self._resident = 0

    # A step ------------------------------------------------------------------------------------------------------

    def begin_step(self, mode: Mode) -> None:
        """Start a step. A streamed one requests its first parts right away. PeerDied after a release."""
        assert self._mode is None, "the step before has not ended"
        self._watch.begin()
        self._mode = mode
        self._traffic = no_traffic(self.geometry.layers)
        self._clock_before.copy_(self._state.clock)
        self._begin_log(mode)
        if self._writer.begin_step():
            self._wake()
        self._begin(mode)

    def _begin_log(self, mode: Mode) -> None:
        self.log.begin(mode, self._state.slot_of)
        if self.log.logs("decode"):
            self._routing_before.copy_(self._admission.routing)

    def _log_decode(self) -> None:
        """What the step has counted, which may have been a graph's, that does not log."""
        if self.log.logs("decode"):
            self.log.note_all(self._admission.routing != self._routing_before)

    def _begin(self, mode: Mode) -> None:
        if mode == "streamed":
            for number in range(self.geometry.stream_groups):
                self._request(number)

    @contextmanager
    def rehearsal(self, mode: Mode) -> Iterator[None]:
        """A step inside it rings for nothing, waits for nothing and computes nothing true; it leaves no trace.

        Only before the first step.
        """
        self._watch.begin()
        self._admission.control[admit.ERROR] = 1
        self._mode = mode
        try:
            self._begin_log(mode)  # its kernels are loaded too
            self._begin(mode)
            yield
            self._log_decode()
            self._outcome(torch.zeros(1, dtype=torch.int64, device=self.pool.device))
            self._watch.mark()
            self._watch.wait()
            self._forget_step()
        finally:
            self._mode = None
            self.log.drop()
            self._reset()
            self._stream.synchronize()
            self._watch.end()

    def __call__(self, layer: int, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See worker.model.moe.Experts. Nothing in it waits for the device or takes a value from it."""
        scales = self._input_scales[layer] if self._input_scales else None
        rows = LayerRows(self.layout, self.geometry.experts, x, weights, experts, scales, self._fixed)
        if self._mode == "streamed":
            self._streamed(layer, rows)
        else:
            self._on_demand(layer, rows)
        out = rows.combined()
        self._watch.mark()
        return out

    def _on_demand(self, layer: int, rows: LayerRows) -> None:
        geometry, admission = self.geometry, self._admission
        most = min(rows.routes, geometry.experts)
        if self.log.logs("demand"):
            self.log.note_layer(layer, rows.offsets[1:] > rows.offsets[:-1])
        launches = admit.launches(geometry.experts, geometry.slots, geometry.max_query, most)
        for query in range(admit.most_queries(most, geometry.slots, geometry.max_query)):
            if query < launches:
                decodes = self._mode == "decode"
                admit.admit_layer(self._state, admission, layer, rows.offsets, query, count_routing=decodes)
            self._wait(query)
            self._check(layer, rows, admission.table, admission.spans[query], geometry.experts)
            rows.compute(
                self.pool, admission.table, admission.spans[query], most if launches > 1 else geometry.max_query
            )

    def _streamed(self, layer: int, rows: LayerRows) -> None:
        geometry = self.geometry
        for part in range(self._streaming.parts):
            number = layer * self._streaming.parts + part
            turn = number % geometry.stream_groups
            self._wait(self._admission.flags.numel() + turn)
            table, span = self._streaming.tables[turn], self._streaming.spans[part]
            self._check(layer, rows, table, span, geometry.group_slots)
            rows.compute(self.pool, table, span, geometry.group_slots)
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

    def _check(self, layer: int, rows: LayerRows, table: torch.Tensor, span: torch.Tensor, reach: int) -> None:
        """Have what the rows are about to be computed with compared with its bank's checksums, if that is asked for."""
        if self._records is not None:
            check_records(self._records, layer, self.pool, table, span, rows.offsets, reach)

    def collect(self, tokens: torch.Tensor) -> list[int]:
        """See worker.step.StepExperts: the end of the step, and what came of it.

        CopyFailed, PeerTimeout, PeerDied, RequestRefused("copy_damaged"): then the step must be aborted.
        """
        self._log_decode()
        values = self._outcome(tokens)
        self._watch.mark()
        self._watch.wait()
        drawn_from = OUTCOME_WORDS + COUNTERS * self.geometry.layers
        failed, error, highest, self._resident, damaged, first = values[:OUTCOME_WORDS].tolist()
        self._traffic += self._since(values[OUTCOME_WORDS:drawn_from])
        self._watch.check()
        if error:  # for good: the device rings nothing any more
            self._watch.release("the copy engine took no query from its full ring")
            self._watch.check()
        if failed or highest > LANDED:
            raise CopyFailed("experts of this step did not land")
        if damaged:
            raise self._damaged(first, damaged)
        drawn: list[int] = values[drawn_from:].tolist()
        return drawn

    def _damaged(self, first: int, count: int) -> RequestRefused:
        """`count` records of the step, of which this is the first, are not what was loaded. It may be the last step."""
        assert self.checks is not None
        error, why = self.checks.failed(*divmod(first, self.geometry.experts), count)
        if why is not None:
            self._watch.release(why)
        return error

    def _outcome(self, tokens: torch.Tensor) -> torch.Tensor:
        """FAILED, ERROR, the highest flag, residents, damaged records and the first one, counters and `tokens`, on the
        host once the stream is there."""
        control = self._admission.control.to(torch.int64)
        return _to_host(
            torch.cat(
                [
                    control[admit.FAILED].reshape(1),
                    control[admit.ERROR].reshape(1),
                    self._flag_words.max().to(torch.int64).reshape(1),
                    (self._state.owner != admit.ABSENT).sum().reshape(1),
                    self._damage,
                    self._counters_now(),
                    tokens,
                ]
            )
        )

    def end_step(self) -> ExpertStats:
        """End a step that has been collected; its counters."""
        stats = self._finish(steps=1, ended=True)
        self.log.end(stats)
        return stats

    def abort_step(self) -> None:
        """End a step that failed: every slot that it used is forgotten. Does nothing if no step runs.

        The traffic of the step is counted, the step is not.
        """
        if self._mode is None:
            return
        self.log.drop()
        ended = False
        try:
            self._watch.mark()
            self._watch.wait()
            self._watch.wait_for_flags()
            try:
                self._forget_step()
            except torch.OutOfMemoryError:  # it may be what the step failed of
                torch.cuda.empty_cache()
                self._forget_step()
            self._traffic += self._since(self._counters_now().cpu())
            ended = True
        except SlotstreamError as error:
            log.error("step_stuck", detail=str(error))
        except (RuntimeError, CudaError) as error:  # of the device, after which it does nothing more
            self._watch.release(f"the device does not work any more: {error}")
        finally:
            self._finish(steps=0, ended=ended)

    def release(self, why: str) -> None:
        """The copy engine is gone: end every wait; from now on all raises PeerDied(why). From any thread."""
        self._watch.release(why)

    def close(self) -> bool:
        """Free pool, flags and ring, which the copy engine must have let go of before.

        False, and nothing is freed, if the device has not ended a step that uses them.
        """
        if not self._watch.ended:
            return False
        self._watch.close()
        for part in (self._mapped, self._ring, self._flags, self._pool):
            part.close()
        return True

    def _forget_step(self) -> None:
        """Forget what the slots hold that were used since the step began, and that it failed.

        With a scored policy also what was used often before it, whose stamps lie behind the clock.
        """
        state = self._state
        used = state.last_used > self._clock_before
        owners = state.owner[used & (state.owner != admit.ABSENT)].long()
        state.slot_of.view(-1)[owners] = admit.ABSENT
        state.owner[used] = admit.ABSENT
        state.last_used[used] = admit.FREE
        self._admission.control[admit.FAILED] = 0
        self._damage.zero_()
        self._flag_words.fill_(LANDED)
        self._resident = int((state.owner != admit.ABSENT).sum())

    def _reset(self) -> None:
        """As made: nothing resident, nothing counted, nothing failed."""
        state, admission = self._state, self._admission
        admit.forget_all(state)
        for counters in (state.clock, admission.routing, admission.stats, self._streaming.stats, self._damage):
            counters.zero_()
        for word in (admit.ERROR, admit.FAILED):
            admission.control[word] = 0
        self._flag_words.fill_(LANDED)
        self._counted.fill(0)

    def _finish(self, steps: int, ended: bool) -> ExpertStats:
        assert self._mode is not None, "no step has begun"
        self._writer.end_step()
        mode, self._mode = self._mode, None
        if ended:
            self._watch.end()
        return self._counters.add(mode, steps, self._traffic, self._writer.busy_us())

    def _counters_now(self) -> torch.Tensor:
        """[COUNTERS * L] int64: the admission's of each layer, then the streaming's."""
        return torch.cat([self._admission.stats.flatten(), self._streaming.stats.flatten()])

    def _since(self, counters: torch.Tensor) -> Traffic:
        """What `_counters_now` says happened since it was looked at last."""
        layers, admitted = self.geometry.layers, len(admit.STATS)
        of_admission, of_streaming = np.split(counters.numpy(), [admitted * layers])
        counted: Traffic = of_admission.reshape(layers, admitted)[:, :2] + of_streaming.reshape(layers, 2)
        since: Traffic = counted - self._counted
        self._counted = counted
        return since


def _record_checks(checks: CopyChecks | None, where: torch.device) -> RecordChecks | None:
    """`checks` as the device has them."""
    if checks is None:
        return None
    expected, within, blocks = map(torch.from_numpy, (checks.sums, *checks.weights))
    return new_record_checks(expected, within, blocks, where)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """`values` on the host, once the stream has come there."""
    if values.device.type == "cpu":
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
