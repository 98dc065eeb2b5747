"""apply_rope against rotation in the complex plane, in complex128."""

import pytest
import torch

from kernels.rope import apply_rope

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(0, 2, 4), (1, 1, 2), (3, 5, 6), (129, 2, 128)])
def test_pairs_are_rotated_like_complex_numbers(dtype: torch.dtype, tokens: int, heads: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
    angles = torch.rand(tokens, head_dim // 2, generator=generator) * 100
    out = apply_rope(x, angles.cos(), angles.sin())
    pairs = torch.complex(*x.double().chunk(2, dim=-1))
    turned = pairs * torch.polar(torch.ones_like(angles).double(), angles.double())[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("x", "cos", "dtype"),
    [
        ((3, 2, 8), (3, 3), torch.float32),
        ((3, 2, 8), (2, 4), torch.float32),
        ((3, 2, 7), (3, 3), torch.float32),
        ((3, 2, 8), (3, 4), torch.bfloat16),
    ],
)
def test_tables_that_do_not_fit_are_refused(x: tuple[int, ...], cos: tuple[int, ...], dtype: torch.dtype) -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match="cos"):
        apply_rope(torch.zeros(x), torch.zeros(cos, dtype=dtype), torch.zeros(cos, dtype=dtype))
