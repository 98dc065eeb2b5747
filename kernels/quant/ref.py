"""Plain torch."""

import torch

from kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0..7; bit 3 is the sign."""

E4M3_MAX = 448.0
"""The greatest number that the type can hold."""

E8M0_BIAS = 127
E8M0_MAX = 254
"""The highest scale that is a number."""


def quant(weight: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    blocks = _blocks(weight.to(torch.float32), NVFP4_BLOCK)
    largest = _largest(blocks)
    if scale is None:
        top = float(largest.max()) if largest.numel() else 0.0
        scale = top / (MAGNITUDES[-1] * E4M3_MAX) if top > 0 else 1.0
    global_scale = torch.tensor(scale, dtype=torch.float32, device=weight.device)
    scales = (largest / MAGNITUDES[-1] / global_scale).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = scales.to(torch.float64) * global_scale.to(torch.float64)
    return _packed(blocks, step), scales, global_scale


def quantised_inputs(x: torch.Tensor, input_scale: float) -> torch.Tensor:
    blocks = _blocks(x.to(torch.float32), NVFP4_BLOCK)
    factor = torch.tensor(input_scale, dtype=torch.float32, device=x.device)
    scales = (_largest(blocks) / MAGNITUDES[-1] / factor).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    step = (scales * factor).unsqueeze(2)
    units = torch.where(step > 0, blocks / step, 0.0)
    return (
        (_signed(x.device)[nearest_codes(units.to(torch.float64)).long()] * scales.unsqueeze(2)).view_as(x).to(x.dtype)
    )


def quant_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _blocks(weight.to(torch.float64), MXFP4_BLOCK)
    fraction, exponent = torch.frexp(_largest(blocks) / MAGNITUDES[-1])  # fraction in [0.5, 1), or 0
    power = torch.where(fraction > 0.5, exponent, exponent - 1) + E8M0_BIAS
    scales = torch.where(fraction > 0, power.clamp(0, E8M0_MAX), 0)
    return _packed(blocks, _power_of_two(scales)), scales.to(torch.uint8)


def quant_fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = weight.new_zeros(down * block[0], across * block[1], dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(down, block[0], across, block[1])
    largest = blocks.abs().amax(dim=(1, 3)) if blocks.numel() else padded.new_zeros(down, across)
    scales = largest / E4M3_MAX
    scales = torch.where(scales > 0, scales, 1.0)
    units = (blocks / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return units.view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scales


def _blocks(weight: torch.Tensor, size: int) -> torch.Tensor:
    """[N, K] -> [N, K / size, size]."""
    rows, columns = weight.shape
    return weight.reshape(rows, columns // size, size)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """[N, B, size] -> [N, B]: the largest magnitudes."""
    return blocks.abs().amax(dim=2) if blocks.numel() else blocks.new_zeros(blocks.shape[:2])


def _packed(blocks: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """[N, B, size] in units of `step` [N, B] float64 -> codes [N, B * size / 2], the even k in the low nibble."""
    step = step.unsqueeze(2)
    units = torch.where(step > 0, blocks.to(torch.float64) / step, 0.0)
    codes = nearest_codes(units).flatten(1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def nearest_codes(units: torch.Tensor) -> torch.Tensor:
    """The code of the nearest E2M1 value, uint8; halfway goes to the even code."""
    values = torch.tensor(MAGNITUDES, dtype=torch.float64, device=units.device)
    halfway = (values[1:] + values[:-1]) / 2
    magnitude = units.abs()
    above = torch.searchsorted(halfway, magnitude.contiguous())  # the halfway points below it
    tie = (above < 7) & (magnitude == halfway[above.clamp(max=6)])
    above = above + (tie & (above % 2 == 1))
    return (above | ((units < 0).to(torch.int64) << 3)).to(torch.uint8)


def dequant(codes: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    per_code = scales.to(torch.float64).repeat_interleave(NVFP4_BLOCK, dim=-1)
    return e2m1_values(codes) * per_code * scale.to(torch.float64)


def dequant_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return e2m1_values(codes) * _power_of_two(scales).repeat_interleave(MXFP4_BLOCK, dim=-1)


def dequant_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = codes.shape
    down, across = min(block[0], rows), min(block[1], columns)  # a block may be far larger than any matrix
    per_code = scales.to(torch.float64).repeat_interleave(down, dim=0).repeat_interleave(across, dim=1)
    return codes.to(torch.float64) * per_code[:rows, :columns]


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """[N, K / 2] packed -> [N, K] float64."""
    nibbles = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)
    return _signed(codes.device)[nibbles.to(torch.int64)]


def _signed(device: torch.device) -> torch.Tensor:
    """[16] float64: the value of each code."""
    return torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float64, device=device)


def _power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """2^(scale - 127) in float64, put together from its bits; not a number of 255."""
    scales = scales.to(torch.int64)
    powers = (scales - E8M0_BIAS + 1023 << 52).view(torch.float64)
    return torch.where(scales > E8M0_MAX, torch.nan, powers)
