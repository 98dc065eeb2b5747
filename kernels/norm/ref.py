"""Plain torch."""

import torch
from torch.nn import functional

from kernels import pointwise


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if zero_centred:
        return (wide * (1.0 + weight.to(torch.float32))).to(x.dtype)
    return weight * wide.to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, fixed: bool = False
) -> torch.Tensor:
    scaled = rms_norm(x, weight, eps).to(torch.float32)
    silu = pointwise.silu if fixed else functional.silu
    return (scaled * silu(gate.to(torch.float32))).to(x.dtype)
