"""What an engine tells of its slots, against a table decoded by the rule that ResidencyReply states."""

from typing import Any, cast

import numpy as np
import pytest

from worker.engine import Engine
from worker.protocol import ResidencyReply


def engine(slots: object) -> Engine:
    """Only its slots are asked."""
    nothing = cast(Any, None)
    return Engine(nothing, nothing, cast(Any, slots), nothing, nothing)


class Slots:
    def __init__(self, table: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> None:
        self._table = table

    def residency(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        return self._table

    def forget(self) -> None:
        self._table[:] = False


@pytest.mark.parametrize("experts", [1, 7, 8, 9, 130])
def test_residents_are_bits_of_each_layers_row(experts: int) -> None:
    table = np.random.default_rng(experts).random((3, experts)) < 0.5
    reply = engine(Slots(table)).residency()
    row = -(-experts // 8)
    assert (reply.layers, reply.experts, len(reply.resident)) == (3, experts, 3 * row)
    for layer in range(3):
        for expert in range(8 * row):
            bit = reply.resident[layer * row + expert // 8] >> expert % 8 & 1
            assert bit == (expert < experts and table[layer, expert])


def test_a_flush_empties_the_slots() -> None:
    flushed = engine(Slots(np.ones((2, 5), np.bool_)))
    flushed.flush()
    assert flushed.residency() == ResidencyReply(2, 5, b"\0\0")


def test_a_dense_model_has_no_layer_of_experts() -> None:
    dense = engine(None)
    dense.flush()
    assert dense.residency() == ResidencyReply(0, 0, b"")
