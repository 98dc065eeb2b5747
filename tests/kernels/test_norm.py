"""rms_norm against float64."""

import pytest
import torch

from kernels.norm import rms_norm

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 127), (5, 128), (2, 3, 129)])
def test_values_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x = (torch.randn(shape, generator=generator) * 30).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    out = rms_norm(x, weight, 1e-6)
    wide = x.double()
    expected = weight.double() * wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-6)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_squares_beyond_the_narrow_type_do_not_overflow() -> None:
    """Against the exact answer: all entries 60000, whose square no float16 holds."""
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones(1, 8, dtype=torch.float16))


def test_a_row_of_zeros_stays_zero() -> None:
    """Against the formula: eps keeps it from dividing by zero."""
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("weight", [torch.ones(7), torch.ones(1, 8)])
def test_a_weight_that_does_not_fit_is_refused(weight: torch.Tensor) -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match="weight"):
        rms_norm(torch.zeros(2, 8), weight, 1e-6)
