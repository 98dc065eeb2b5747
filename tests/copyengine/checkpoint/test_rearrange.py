"""Orders of gpt-oss' files: against the formulas of transformers' GptOssExperts, element by element."""

import numpy as np
import pytest

from copyengine.checkpoint.rearrange import AS_IT_IS, Order

N, K = 6, 32
FIELD = np.arange(N * K, dtype=np.uint16).reshape(N, K)
"""Rows 0 .. 2 are gate's, 3 .. 5 up's."""
ALTERNATING = FIELD[[0, 3, 1, 4, 2, 5]]
"""`gate_up[..., ::2]` is gate and `gate_up[..., 1::2]` is up."""


@pytest.mark.parametrize(
    ("order", "stored"),
    [
        (AS_IT_IS, FIELD),
        (Order(transposed=True), FIELD.T),
        (Order(interleaved=True), ALTERNATING),
        (Order(transposed=True, interleaved=True), ALTERNATING.T),
        (Order(run=16), FIELD.reshape(N, 2, 16)),
        (Order(interleaved=True, run=8), ALTERNATING.reshape(N, 4, 8)),
    ],
)
def test_what_the_files_hold_becomes_the_field(order: Order, stored: np.ndarray) -> None:
    target = np.full(FIELD.nbytes, 0xA5, np.uint8)
    assert order.stored(FIELD.shape) == stored.shape
    order.fill(target, np.ascontiguousarray(stored).reshape(-1), N)
    np.testing.assert_array_equal(target.view(np.uint16).reshape(N, K), FIELD)


def test_biases_are_one_column() -> None:
    target = np.zeros(4 * N, np.uint8)
    Order(interleaved=True).fill(target, np.array([0, 3, 1, 4, 2, 5], np.float32), N)
    assert target.view(np.float32).tolist() == list(range(N)) and Order(interleaved=True).stored((N,)) == (N,)
