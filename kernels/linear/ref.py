"""Plain torch: a fixed number of rows at a time, in memory of their own, filled up with zeros.

Measured on an AMD EPYC with torch 2.13 (MKL 2024.2, oneDNN 3.12; 2026-11): of 1 to 64 rows at a time, 160 shapes of the
weight, in float32, bfloat16 and float16, a row had the same bits in every place, beside zeros and beside other rows,
with one thread and with two. A row alone takes another way through MKL, and where activations start matters to it. So
may the number of threads: from three on, MKL's products of 24 columns have other bits than with one.
"""

import torch
from torch.nn import functional

ROWS = 16
"""At a time. Weights of 5120 x 2048 bfloat16 and one compute thread took 1.7 ms for a row and 54 ms for 512 in torch's
own way, 1.8 and 120 ms by 8 rows, 2.9 and 84 ms by 16, 4.4 and 66 ms by 32 (same machine)."""

SHIFTS = (1, 3, ROWS // 2)
"""By how many places rows are moved to see whether that changes them."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for first in range(0, x.shape[0], rows):
        here = x[first : first + rows]
        out[first : first + rows] = functional.linear(_filled(here, rows), weight, bias)[: here.shape[0]]
    return out


def heads_linear(x: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    out = x.new_empty(x.shape[0], x.shape[1], weight.shape[2])
    for first in range(0, x.shape[0], rows):
        here = x[first : first + rows]
        block = _filled(here.transpose(0, 1), rows)
        out[first : first + rows] = torch.bmm(block, weight).transpose(0, 1)[: here.shape[0]]
    return out


def places_are_alike(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether ROWS rows that change places come out as they were."""
    generator = torch.Generator().manual_seed(ROWS)
    width, heads = weight.shape[-1 if weight.ndim == 2 else 1], weight.shape[:-2]
    x = torch.randn(*heads, ROWS, width, generator=generator).to(weight.dtype)

    def product(block: torch.Tensor) -> torch.Tensor:
        return torch.bmm(block, weight) if heads else functional.linear(block, weight, bias)

    straight = product(x)
    return all(torch.equal(product(x.roll(shift, -2)), straight.roll(shift, -2)) for shift in SHIFTS)


def _filled(here: torch.Tensor, rows: int) -> torch.Tensor:
    """[..., rows, K] in an allocation of its own, of `here` [..., n, K] and zeros behind it."""
    block = here.new_zeros(*here.shape[:-2], rows, here.shape[-1])
    block[..., : here.shape[-2], :] = here
    return block
