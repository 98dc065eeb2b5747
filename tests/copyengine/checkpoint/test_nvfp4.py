"""The numpy quantiser against kernels.quant, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from copyengine.checkpoint import nvfp4
from copyengine.checkpoint.nvfp4 import Quantised, global_of, quantise, reciprocal
from kernels.quant import Nvfp4, dequant, quant


def exact(matrix: Quantised) -> NDArray[np.float64]:
    scales = torch.from_numpy(matrix.scales.view(np.uint8)).view(torch.float8_e4m3fn)
    values: NDArray[np.float64] = dequant(
        Nvfp4(torch.from_numpy(matrix.codes), scales, torch.tensor(matrix.factor))
    ).numpy()
    return values


def assert_same(weight: NDArray[np.float32], factor: np.float32 | None = None) -> Quantised:
    theirs = quant(torch.from_numpy(weight), None if factor is None else float(factor))
    ours = quantise(weight, global_of(weight) if factor is None else factor)
    assert ours.factor.tobytes() == theirs.scale.numpy().tobytes()
    assert ours.scales.tobytes() == theirs.scales.view(torch.uint8).numpy().tobytes()
    assert ours.codes.tobytes() == theirs.codes.numpy().tobytes()
    return ours


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (1, 16), (7, 48), (129, 2064)])
@pytest.mark.parametrize("spread", [0.0, 3.0, 20.0])
def test_drawn_matrices(shape: tuple[int, int], spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of like and of very different magnitudes, whole and in pieces."""
    rng = np.random.default_rng(shape[1])
    blocks = np.exp(spread * rng.standard_normal((shape[0], shape[1] // 16, 1)) / 3)
    weight = (rng.standard_normal((*blocks.shape[:2], 16)) * blocks).reshape(shape).astype(np.float32)
    whole = assert_same(weight)
    monkeypatch.setattr(nvfp4, "PIECE_ELEMENTS", 100)
    pieces = assert_same(weight)
    assert pieces.codes.tobytes() == whole.codes.tobytes() and pieces.scales.tobytes() == whole.scales.tobytes()


@settings(max_examples=200)
@given(
    st.integers(1, 3).flatmap(
        lambda rows: arrays(
            np.float32,
            (rows, 32),
            elements=st.floats(-(2.0**100), 2.0**100, width=32)
            | st.sampled_from([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 448.0])
            | st.floats(-8, 8, width=16),
        )
    ),
    st.none() | st.sampled_from([1.0, 2.0**-9, 1 / 3, 2.0**90]),
)
def test_any_numbers_and_globals(weight: NDArray[np.float32], factor: float | None) -> None:
    """Ties, zeros of both signs, scales that are subnormal, zero or cut off at 448."""
    if factor is not None or global_of(weight) >= np.finfo(np.float32).tiny:
        assert_same(weight, None if factor is None else np.float32(factor))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_element_types_of_checkpoints(dtype: type) -> None:
    weight: NDArray[np.generic] = np.random.default_rng(0).standard_normal((8, 32)).astype(dtype)
    same = assert_same(weight.astype(np.float32))
    assert global_of(weight) == same.factor
    for ours, theirs in zip(quantise(weight, same.factor), same, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("top", [0.0, 1e-45, 1e-40, 1e-36, 1e-20, 0.02, 1.0, 1e20, 3e38])
def test_globals_are_numbers_that_files_can_hold(top: float) -> None:
    """Of files that hold the global, and of those that hold one over it."""
    weight = np.full((1, 16), top, np.float32)
    stored = reciprocal(global_of(weight))
    for factor in (global_of(weight), np.float32(1) / stored):
        assert np.isfinite(factor) and factor > 0 and np.isfinite(stored) and stored > 0
        assert np.allclose(exact(quantise(weight, factor)), top, rtol=0.1, atol=1e-37)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_shows_in_the_global(value: float) -> None:
    weight = np.ones((2, 32), np.float32)
    weight[1, 3] = value
    assert not np.isfinite(global_of(weight))
