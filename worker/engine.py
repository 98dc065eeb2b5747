"""A loaded model, which runs steps and tells of itself. Brings torch."""

import asyncio
from queue import SimpleQueue
from threading import Lock

import numpy as np
from msgspec.structs import replace

from copyengine.wire.errors import RequestRefused
from worker.backend import Backend, Slots
from worker.copy_checks import MOST_DAMAGED_STEPS
from worker.expert_stats import MODES, add_figures
from worker.protocol import (
    ExpertStats,
    LayerStatsReply,
    LayerTraffic,
    Loaded,
    Mode,
    OracleFigures,
    ResidencyReply,
    RunStep,
    SlotsVerified,
    StepDone,
)
from worker.routing_log import Window
from worker.step import StepRunner


class Engine:
    """See worker.server.Engine."""

    def __init__(
        self, facts: Loaded, runner: StepRunner, slots: Slots | None, backend: Backend, lost: asyncio.Future[str]
    ) -> None:
        self.facts = facts
        self.lost = lost
        self._runner = runner
        self._slots = slots
        self._backend = backend
        self._windows: SimpleQueue[Window] = SimpleQueue()
        self._judging = Lock()
        self._judged = OracleFigures()

    def run(self, step: RunStep) -> StepDone:
        """Run one step on the calling thread. Raises as StepRunner.run does."""
        return self._runner.run(step)

    def stats(self) -> dict[Mode, ExpertStats]:
        """Counters since the start, per mode; a dense model has none."""
        return self._slots.stats() if self._slots else {mode: ExpertStats() for mode in MODES}

    def layer_stats(self) -> LayerStatsReply:
        """Counters of each layer since the start, but for the oracle's; on the compute thread."""
        if self._slots is None:
            return LayerStatsReply(LayerTraffic(), LayerTraffic(), LayerTraffic(), [])
        if (window := self._slots.log.take()) is not None:
            self._windows.put(window)
        counters = self._slots.layer_stats()
        routing: list[list[int]] = self._slots.decode_routing.tolist()
        return LayerStatsReply(counters["decode"], counters["demand"], counters["streamed"], routing)

    def with_oracle(self, reply: LayerStatsReply) -> LayerStatsReply:
        """`reply` with what an oracle would have hit in all that was logged before it. Takes a while: on any thread but
        the compute thread and the loop's."""
        with self._judging:
            while not self._windows.empty():
                self._judged = add_figures(self._judged, self._windows.get().figures())
            return replace(reply, oracle=self._judged)

    def residency(self) -> ResidencyReply:
        """Which experts are in slots; on the compute thread."""
        if self._slots is None:
            return ResidencyReply()
        table = self._slots.residency()
        return ResidencyReply(*table.shape, np.packbits(table, axis=1, bitorder="little").tobytes())

    def verify_slots(self) -> SlotsVerified:
        """Compare what is in slots with the banks; on the compute thread. RequestRefused("not_verifying")."""
        if self._slots is None or self._slots.checks is None:
            raise RequestRefused("not_verifying", "slots are compared with the banks only with --verify-copies")
        return SlotsVerified(int(self._slots.residency().sum()), self._slots.verify())

    def damaged_steps(self) -> int:
        """Steps that failed because an expert was not what was loaded."""
        return self._slots.checks.steps if self._slots and self._slots.checks else 0

    def distrusts_copies(self) -> bool:
        """Whether it is for these that no step runs any more."""
        return self.damaged_steps() >= MOST_DAMAGED_STEPS

    def resident(self) -> int:
        """Slots that hold an expert."""
        return self._slots.resident() if self._slots else 0

    def flush(self) -> None:
        """No expert is in a slot any more, as after the load; on the compute thread."""
        if self._slots:
            self._slots.forget()

    def release(self, why: str) -> None:
        """The copy engine is gone, or we are going: no wait for copies goes on."""
        if self._slots:
            self._slots.release(why)

    def close(self) -> bool:
        """Free pool, flags and ring, and give the device back; on the compute thread.

        False if the device has not ended a step: then nothing is freed, and the process must end without it.
        """
        if self._slots and not self._slots.close():
            return False
        self._backend.close()
        return True
