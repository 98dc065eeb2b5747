"""The expert banks: one per MoE layer, each exactly E records long, in memory that the device copies from."""

from functools import partial

import numpy as np

from copyengine.checkpoint.parallel import run_all
from copyengine.device import Bank, CopyDevice, OnBytes


class Banks:
    """L banks of E records, all or none. A dense model has none."""

    def __init__(
        self, device: CopyDevice, run_id: str, layers: int, experts: int, record_nbytes: int, on_bytes: OnBytes
    ) -> None:
        """Allocates; `on_bytes` hears of the bytes piece by piece, from several threads, and may raise.

        ConfigError if they do not fit.
        """
        self.layers = layers
        self.experts = experts
        self.record_nbytes = record_nbytes
        self._banks: dict[int, Bank] = {}  # by layer

        def allocate(layer: int) -> None:
            self._banks[layer] = device.allocate_bank(run_id, f"bank{layer}", experts * record_nbytes, on_bytes)

        try:
            run_all([partial(allocate, layer) for layer in range(layers)], device.bank_threads, "bank-allocator")
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Of all banks together."""
        return self.layers * self.experts * self.record_nbytes

    @property
    def pinned_nbytes(self) -> int:
        """Of all banks together, what a GPU copies by itself; 0 on the host."""
        return sum(bank.pinned_nbytes for bank in self._banks.values())

    @property
    def banks(self) -> list[Bank]:
        """[L] of E * record_nbytes bytes."""
        return [self._banks[layer] for layer in range(self.layers)]

    @property
    def records(self) -> list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]]:
        """[L] of [E, record_nbytes] uint8."""
        return [bank.array.reshape(self.experts, self.record_nbytes) for bank in self.banks]

    def close(self) -> None:
        """Free them."""
        for bank in self._banks.values():
            bank.close()
        self._banks.clear()
        self.layers = 0
