"""Steps of a model that has no experts: nothing to bring in, but an end to wait for."""

from collections.abc import Callable

import torch

from copyengine.wire.errors import PeerDied
from worker.protocol import ExpertStats, Mode


class DenseSteps:
    """See worker.step.StepExperts."""

    def __init__(
        self, synchronize: Callable[[], None] = lambda: None, on_broken: Callable[[str], None] = lambda _: None
    ) -> None:
        """`synchronize` waits for all that was computed, RuntimeError if the device is broken: then `on_broken` hears
        of it, and no further step can run."""
        self._synchronize = synchronize
        self._on_broken = on_broken
        self._why_broken: str | None = None

    def begin_step(self, mode: Mode) -> None:
        """PeerDied if the device is broken."""
        if self._why_broken is not None:
            raise PeerDied(self._why_broken)

    def collect(self, tokens: torch.Tensor) -> list[int]:
        """See StepExperts."""
        return [int(token) for token in tokens.tolist()]

    def end_step(self) -> ExpertStats:
        """One step, no experts."""
        return ExpertStats(steps=1)

    def abort_step(self) -> None:
        """A step failed; see whether the device works on."""
        try:
            self._synchronize()
        except RuntimeError as error:
            if self._why_broken is None:
                self._why_broken = f"the device does not work any more: {error}"
                self._on_broken(self._why_broken)
