"""NVFP4: round trips of what it holds exactly, a decoder written out, and the error bound of the format."""

import pytest
import torch

from kernels.quant import Nvfp4, dequant, quant
from kernels.quant.ref import MAGNITUDES


def test_dequant_against_a_decoder_written_out() -> None:
    """Byte by byte with Python integers: every code in both nibbles, under several scales."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    scales = torch.tensor([1.0, 0.5, 448.0, 2.0**-9, 3.25, 1.0, 7.0, 240.0] * 4).to(torch.float8_e4m3fn).reshape(4, 8)
    actual = dequant(Nvfp4(codes, scales, torch.tensor(0.3)))
    factor = float(torch.tensor(0.3))
    for n in range(4):
        for k in range(128):
            code = int(codes[n, k // 2]) >> (4 * (k % 2)) & 0xF
            exponent, half = code >> 1 & 3, code & 1
            magnitude = half / 2 if exponent == 0 else (1 + half / 2) * 2 ** (exponent - 1)
            assert actual[n, k] == (-1) ** (code >> 3) * magnitude * float(scales[n, k // 16]) * factor


def test_exactly_representable_weights_survive() -> None:
    """Round trip: codes times scales times a power of two, each block with its 6."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor(MAGNITUDES)[torch.randint(0, 8, (6, 4, 16), generator=generator)]
    values[:, :, 3] = -6.0
    values *= torch.where(torch.rand(values.shape, generator=generator) < 0.5, -1.0, 1.0)
    scales = torch.rand(6, 4, 1, generator=generator).mul(400).to(torch.float8_e4m3fn).float()
    scales[0, 0] = 448.0
    weight = (values * scales * 2.0**-11).reshape(6, 64)
    for source in (weight, weight.to(torch.bfloat16)):
        assert torch.equal(dequant(quant(source)), weight.double())
    assert torch.equal(dequant(quant(weight, 2.0**-11)), weight.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (33, 48), (128, 160), (3, 0), (0, 16)])
def test_every_error_is_within_the_format_s_bound(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """At most half the widest step (6 - 4) of the block's scale, and the rounding of that scale itself (1/16)."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    if weight.numel():
        weight[0, :16] = 0
    matrix = quant(weight)
    assert matrix.codes.shape == (shape[0], shape[1] // 2) and matrix.scales.shape == (shape[0], shape[1] // 16)
    blocks = weight.double().reshape(shape[0], shape[1] // 16, 16)
    error = (dequant(matrix).reshape(blocks.shape) - blocks).abs()
    assert torch.isfinite(error).all()
    if error.numel():
        assert (error <= blocks.abs().amax(2, keepdim=True) * (1 / 6 + 1 / 16)).all()
        assert not dequant(matrix)[0, :16].any()


def test_halfway_goes_to_the_even_code() -> None:
    """Against the E2M1 values: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4."""
    weight = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -2.5, -5.0, 0, 0, 0]])
    expected = [[0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -1, -2, -4, 0, 0, 0]]
    assert dequant(quant(weight, 1.0)).tolist() == expected


def test_all_zeros_stay_zero() -> None:
    """Against zero; the global must be usable."""
    matrix = quant(torch.zeros(2, 32))
    assert not dequant(matrix).any() and float(matrix.scale) == 1.0


def test_refusals() -> None:
    """Against the docstrings."""
    for weight in (torch.zeros(16), torch.zeros(2, 24), torch.zeros(2, 16, dtype=torch.int32)):
        with pytest.raises(ValueError, match="weight must be"):
            quant(weight)
    matrix = quant(torch.zeros(2, 32))
    with pytest.raises(ValueError, match="do not fit"):
        dequant(matrix._replace(scales=matrix.scales[:1]))
