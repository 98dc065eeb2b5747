"""Each format: round trips of what it holds exactly, a decoder written out, and the error bound of the format."""

import numpy as np
import pytest
import torch

from kernels.quant import (
    Fp8Block,
    Fp8Tensor,
    Mxfp4,
    Nvfp4,
    dequant,
    quant,
    quant_fp8_block,
    quant_fp8_tensor,
    quant_mxfp4,
    quantised_inputs,
)
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


def e2m1(code: int) -> float:
    """By the OCP MX specification: sign, two bits of exponent of bias 1, one bit of mantissa."""
    exponent, half = code >> 1 & 3, code & 1
    magnitude = half / 2 if exponent == 0 else (1 + half / 2) * 2 ** (exponent - 1)
    return -magnitude if code >> 3 else magnitude


def e4m3(code: int) -> float:
    """By the OCP FP8 specification: sign, four bits of exponent of bias 7, three of mantissa, no infinities."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code >> 7 else magnitude


def test_mxfp4_against_a_decoder_written_out() -> None:
    """Every code in both nibbles, under the least, the largest and other scales; 255 is not a number."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    scales = torch.tensor([0, 1, 127, 254] * 4, dtype=torch.uint8).reshape(4, 4)
    actual = dequant(Mxfp4(codes, scales))
    for n in range(4):
        for k in range(128):
            code = int(codes[n, k // 2]) >> (4 * (k % 2)) & 0xF
            assert actual[n, k] == e2m1(code) * 2.0 ** (int(scales[n, k // 32]) - 127)
    scales[0, 0] = 255
    assert dequant(Mxfp4(codes, scales)).isnan().nonzero().tolist() == [[0, k] for k in range(32)]


@pytest.mark.parametrize("block", [(3, 5), (1, 16), (16, 1), (100, 100)])
def test_fp8_against_a_decoder_written_out(block: tuple[int, int]) -> None:
    """Every code that is a number, in blocks that do not come out even and one larger than the matrix."""
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    codes = torch.tensor([*numbers, 0, 1], dtype=torch.uint8).reshape(16, 16)
    scales = torch.rand(-(-16 // block[0]), -(-16 // block[1]), generator=torch.Generator().manual_seed(0))
    actual = dequant(Fp8Block(codes.view(torch.float8_e4m3fn), scales, block))
    whole = dequant(Fp8Tensor(codes.view(torch.float8_e4m3fn), scales[0, 0]))
    for n in range(16):
        for k in range(16):
            value = e4m3(int(codes[n, k]))
            assert actual[n, k] == value * float(scales[n // block[0], k // block[1]])
            assert whole[n, k] == value * float(scales[0, 0])


@pytest.mark.parametrize("shape", [(1, 32), (33, 96), (3, 0), (0, 32)])
@pytest.mark.parametrize("exponent", [0, -140, 120])
def test_mxfp4_codes_are_the_nearest_under_the_least_scale(shape: tuple[int, int], exponent: int) -> None:
    """Brute force: the largest magnitude is at most 6 scales, above 6 half scales, and no other code is nearer."""
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 2.0**exponent
    if weight.numel():
        weight[0, :32] = 0
    codes, scales = quant_mxfp4(weight)
    assert scales.shape == (shape[0], shape[1] // 32)
    units = [e2m1(code) for code in range(16)]
    actual = dequant(Mxfp4(codes, scales))
    for n in range(shape[0]):
        for b in range(shape[1] // 32):
            scale, block = int(scales[n, b]), weight[n, 32 * b : 32 * b + 32]
            step, largest = 2.0 ** (scale - 127), float(block.abs().max())
            assert scale == 0 or 3 * step < largest <= 6 * step
            for k, value in enumerate(block.tolist()):
                nearest = min(abs(value - unit * step) for unit in units)
                assert abs(value - float(actual[n, 32 * b + k])) == nearest
    if weight.numel():
        assert not codes[0, :16].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (33, 47), (128, 160), (3, 0), (0, 16)])
def test_fp8_errors_are_within_the_format_s_bound(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """1/16 of each value (three bits of mantissa), or half the least step of its block; no code is not a number."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[weight.abs() < 0.1] *= 1e-3
    if weight.numel():
        weight[0, :10] = 0
    block = (7, 10)
    matrix = quant_fp8_block(weight, block)
    assert matrix.scales.shape == (-(-shape[0] // 7), -(-shape[1] // 10))
    steps = matrix.scales.double().repeat_interleave(7, 0).repeat_interleave(10, 1)[: shape[0], : shape[1]]
    error = (dequant(matrix) - weight.double()).abs()
    assert (error <= 1.001 * torch.maximum(weight.double().abs() / 16, steps * 2**-10)).all()
    for other in (quant_fp8_tensor(weight), quant_fp8_block(weight, (1000, 1000))):
        assert torch.isfinite(dequant(other)).all()
        scale = other.scale if isinstance(other, Fp8Tensor) else other.scales.sum()
        if weight.any():
            assert scale == weight.float().abs().max() / 448
            assert dequant(other).abs().max() == 448 * scale.double()


def test_fp8_of_weights_it_holds_exactly() -> None:
    """Round trip: every number that E4M3 has, under a scale that is a power of two."""
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    weight = torch.tensor([e4m3(code) for code in numbers]).reshape(2, 127) * 2.0**-20
    for matrix in (quant_fp8_tensor(weight), quant_fp8_block(weight, (2, 127))):
        assert torch.equal(dequant(matrix), weight.double())
        assert not ((matrix.codes.view(torch.uint8) & 0x7F) == 0x7F).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("input_scale", [2.0**-9, 0.0123, 1e-6])
def test_quantised_inputs_against_blocks_written_out(dtype: torch.dtype, input_scale: float) -> None:
    """Scales and codes found by trying all of E4M3 and E2M1, with numpy's float32; saturated under a small scale."""
    x = (torch.randn(3, 48, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    x[0, :16], x[1, 3] = 0, 300
    actual = quantised_inputs(x, input_scale)
    assert actual.dtype == dtype
    factor = np.float32(input_scale)
    scales = np.array([e4m3(code) for code in range(0x7F)], np.float32)
    for t in range(3):
        for b in range(3):
            block = x[t, 16 * b : 16 * b + 16].float().numpy()
            wanted = np.abs(block).max() / np.float32(6) / factor
            scale = scales[np.abs(scales - wanted).argmin()]
            for k, value in enumerate(block):
                unit = value / (scale * factor) if scale else np.float32(0)
                nearest = min((abs(e2m1(code) - unit), code & 1, code) for code in range(16))[2]
                assert float(actual[t, 16 * b + k]) == e2m1(nearest) * scale
    x[2, 40] = torch.nan
    spoilt = quantised_inputs(x, input_scale).isnan()
    assert spoilt[2, 32:].all() and not spoilt[:2].any() and not spoilt[2, :32].any()


def test_refusals() -> None:
    """Against the docstrings."""
    for weight in (torch.zeros(16), torch.zeros(2, 24), torch.zeros(2, 16, dtype=torch.int32)):
        with pytest.raises(ValueError, match="weight must be"):
            quant(weight)
        with pytest.raises(ValueError, match="weight must be"):
            quant_mxfp4(weight)
        with pytest.raises(ValueError, match="weight must be"):
            quantised_inputs(weight, 1.0)
    with pytest.raises(ValueError, match="weight must be"):
        quant_fp8_tensor(torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="weight must be"):
        quant_fp8_block(torch.zeros(2), (1, 1))
    with pytest.raises(ValueError, match="at least 1 x 1, not 0 x 4"):
        quant_fp8_block(torch.zeros(2, 2), (0, 4))
    nvfp4, mxfp4, fp8 = quant(torch.zeros(2, 32)), quant_mxfp4(torch.zeros(2, 32)), quant_fp8_tensor(torch.zeros(2, 2))
    for matrix in (
        nvfp4._replace(scales=nvfp4.scales[:1]),
        mxfp4._replace(scales=mxfp4.scales[:1]),
        fp8._replace(scale=torch.ones(1)),
        quant_fp8_block(torch.zeros(5, 5), (2, 2))._replace(block=(3, 2)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            dequant(matrix)
