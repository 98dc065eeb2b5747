"""Which experts the first steps since the log was last taken have routed to: what --collect-stats holds an oracle to.

The log lies where the slots' tables are, LOGGED_STEPS x L x E bytes and no more; once it is full, nothing is logged
until it is taken. On a GPU it is written in the compute stream, beside the step's graphs, and read when it is taken,
which is between two steps: no step waits for it.
"""

from dataclasses import dataclass

import torch

from worker.oracle import Marks, oracle_hits
from worker.protocol import ExpertStats, Mode, OracleFigures


@dataclass(frozen=True)
class Window:
    """Steps one after the other, but for streamed ones, and what the policy made of them."""

    resident: Marks  # [L, E] before the first step
    routed: Marks  # [N, L, E]
    decodes: list[bool]  # [N]
    lookups: int  # of the decode steps, as hits
    hits: int
    slots: int

    def figures(self) -> OracleFigures:
        """What the policy hit beside what an oracle would have hit."""
        best = oracle_hits(self.resident, self.routed, self.decodes, self.slots)
        return OracleFigures(sum(self.decodes), self.lookups, self.hits, best)


class RoutingLog:
    """One thread runs steps and takes the log. With `steps` 0 nothing is ever logged."""

    def __init__(self, steps: int, layers: int, experts: int, slots: int, device: torch.device | str = "cpu") -> None:
        self._slots = slots
        self._routed = torch.zeros(steps, layers, experts, dtype=torch.bool, device=device)
        self._resident = torch.zeros(layers, experts, dtype=torch.bool, device=device)
        self._modes: list[Mode] = []
        self._lookups = self._hits = 0
        self._mode: Mode | None = None  # of the running step, if it is logged

    def begin(self, mode: Mode, slot_of: torch.Tensor) -> None:
        """A step begins; `slot_of` [L, E] is below 0 for what is not resident."""
        self._mode = mode if mode != "streamed" and len(self._modes) < len(self._routed) else None
        if self._mode is not None:
            if not self._modes:
                self._resident.copy_(slot_of >= 0)
            self._routed[len(self._modes)].zero_()

    def logs(self, mode: Mode) -> bool:
        """Whether the running step is of this mode, and logged."""
        return self._mode == mode

    def note(self, layer: int, experts: list[int]) -> None:
        """The layer's experts, where the log is on the host."""
        if self._mode is not None and experts:
            self._routed[len(self._modes), layer, experts] = True

    def note_layer(self, layer: int, routed: torch.Tensor) -> None:
        """The same where it is not: [E] bool."""
        if self._mode is not None:
            self._routed[len(self._modes), layer].copy_(routed)

    def note_all(self, routed: torch.Tensor) -> None:
        """Those of all layers: [L, E] bool."""
        if self._mode is not None:
            self._routed[len(self._modes)].copy_(routed)

    def end(self, stats: ExpertStats) -> None:
        """The step has ended well."""
        if self._mode is not None:
            self._modes.append(self._mode)
            if self._mode == "decode":
                self._lookups += stats.lookups
                self._hits += stats.hits
        self._mode = None

    def drop(self) -> None:
        """The step has failed, and what it left in the slots is none of the policy's doing: the log begins anew."""
        self._modes, self._lookups, self._hits, self._mode = [], 0, 0, None

    def take(self) -> Window | None:
        """What is logged, if anything; the log begins anew."""
        if not self._modes:
            return None
        routed = self._routed[: len(self._modes)].cpu().numpy().copy()
        resident = self._resident.cpu().numpy().copy()
        decodes = [mode == "decode" for mode in self._modes]
        window = Window(resident, routed, decodes, self._lookups, self._hits, self._slots)
        self.drop()
        return window
