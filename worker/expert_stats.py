"""Adding up expert traffic: per mode, and of each layer in it."""

from typing import Any

import numpy as np

from worker.protocol import ExpertStats, LayerTraffic, Mode, OracleFigures

MODES: tuple[Mode, ...] = ("decode", "demand", "streamed")

Traffic = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""[L, 2]: hits and misses of each layer."""


class TrafficCounters:
    """What the steps of each mode hit and missed since the start.

    One thread adds steps and asks for `by_layer`; `totals` may be called from others.
    """

    def __init__(self, layers: int, record_nbytes: int) -> None:
        self._record_nbytes = record_nbytes
        self._totals = {mode: ExpertStats() for mode in MODES}
        self._layers = {mode: no_traffic(layers) for mode in MODES}

    def add(self, mode: Mode, steps: int, traffic: Traffic, wait_us: int = 0) -> ExpertStats:
        """Count `steps` steps with this traffic (0 for one that failed) and these microseconds of copying; their
        figures alone."""
        hits, misses = traffic.sum(0).tolist()
        step = ExpertStats(steps, hits + misses, hits, misses, misses * self._record_nbytes, wait_us / 1e6)
        self._totals[mode] = add(self._totals[mode], step)
        self._layers[mode] += traffic
        return step

    def totals(self) -> dict[Mode, ExpertStats]:
        """Per mode, over all layers."""
        return dict(self._totals)

    def by_layer(self) -> dict[Mode, LayerTraffic]:
        """Per mode, of each layer, the traffic of failed steps included."""
        return {mode: layer_traffic(traffic) for mode, traffic in self._layers.items()}


def no_traffic(layers: int) -> Traffic:
    """[L, 2] zeros."""
    return np.zeros((layers, 2), np.int64)


def layer_traffic(traffic: np.ndarray[Any, Any]) -> LayerTraffic:
    """[L, 2] as a message."""
    return LayerTraffic(traffic[:, 0].tolist(), traffic[:, 1].tolist())


def add(a: ExpertStats, b: ExpertStats) -> ExpertStats:
    """The sum of two."""
    return ExpertStats(
        steps=a.steps + b.steps,
        lookups=a.lookups + b.lookups,
        hits=a.hits + b.hits,
        misses=a.misses + b.misses,
        copied_nbytes=a.copied_nbytes + b.copied_nbytes,
        copy_wait_s=a.copy_wait_s + b.copy_wait_s,
    )


def add_figures(a: OracleFigures, b: OracleFigures) -> OracleFigures:
    """The sum of two."""
    return OracleFigures(a.steps + b.steps, a.lookups + b.lookups, a.hits + b.hits, a.oracle_hits + b.oracle_hits)
