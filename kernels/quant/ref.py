"""Plain torch."""

import torch

from kernels.formats import NVFP4_BLOCK

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0..7; bit 3 is the sign."""

E4M3_MAX = 448.0


def quant(weight: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    blocks = weight.to(torch.float32).reshape(rows, columns // NVFP4_BLOCK, NVFP4_BLOCK)
    largest = blocks.abs().amax(dim=2) if blocks.numel() else blocks.new_zeros(blocks.shape[:2])
    if scale is None:
        top = float(largest.max()) if largest.numel() else 0.0
        scale = top / (MAGNITUDES[-1] * E4M3_MAX) if top > 0 else 1.0
    global_scale = torch.tensor(scale, dtype=torch.float32, device=weight.device)
    scales = (largest / MAGNITUDES[-1] / global_scale).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = scales.to(torch.float64).unsqueeze(2) * global_scale.to(torch.float64)
    units = torch.where(step > 0, blocks.to(torch.float64) / step, 0.0)
    codes = nearest_codes(units).reshape(rows, columns)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales, global_scale


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
    signed = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float64, device=codes.device)
    nibbles = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)
    units = signed[nibbles.to(torch.int64)]
    per_code = scales.to(torch.float64).repeat_interleave(NVFP4_BLOCK, dim=-1)
    return units * per_code * scale.to(torch.float64)
