"""The expert banks: one segment per MoE layer, each exactly E records long."""

import numpy as np

from copyengine.device import Bytes, OnBytes
from copyengine.device.host import Segment, create_segment


class Banks:
    """L banks of E records, zeroed; all or none. A dense model has none."""

    def __init__(self, run_id: str, layers: int, experts: int, record_nbytes: int, on_bytes: OnBytes) -> None:
        """Allocates; `on_bytes` hears of the bytes piece by piece and may raise. ConfigError if they do not fit."""
        self.layers = layers
        self.experts = experts
        self.record_nbytes = record_nbytes
        self._segments: list[Segment] = []
        try:
            for layer in range(layers):
                self._segments.append(create_segment(run_id, f"bank{layer}", experts * record_nbytes, on_bytes))
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Of all banks together."""
        return self.layers * self.experts * self.record_nbytes

    @property
    def runs(self) -> list[Bytes]:
        """[L] of [E * record_nbytes] uint8."""
        return [segment.array for segment in self._segments]

    @property
    def records(self) -> list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]]:
        """[L] of [E, record_nbytes] uint8."""
        return [segment.array.reshape(self.experts, self.record_nbytes) for segment in self._segments]

    def close(self) -> None:
        """Free them."""
        for segment in self._segments:
            segment.close()
        self._segments.clear()
