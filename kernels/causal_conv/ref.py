"""Plain torch, span by span, so that nothing depends on what else is in the step."""

from itertools import pairwise

import torch
from torch.nn import functional

from kernels import pointwise
from kernels.state_pieces import FIRST, ROWS, SOURCE, TARGET, Pieces


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, pieces: Pieces, fixed: bool = False
) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    table, spans = pieces.table.tolist(), pieces.spans.tolist()
    history = weight.shape[1] - 1
    for begin, end in pairwise(spans):
        first, rows = table[begin][FIRST], sum(piece[ROWS] for piece in table[begin:end])
        padded = torch.cat((_state(state, table[begin][SOURCE]), x[first : first + rows].to(torch.float32)))
        out[first : first + rows] = _convolved(padded, weight, fixed).to(x.dtype)
        for piece in table[begin:end]:
            if piece[TARGET] >= 0:
                done = piece[FIRST] + piece[ROWS] - first
                state[piece[TARGET]] = padded[done : done + history]
    return out


def causal_conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    fixed: bool = False,
) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for row, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        padded = torch.cat((_state(state, source), x[row : row + 1].to(torch.float32)))
        out[row] = _convolved(padded, weight, fixed)[0].to(x.dtype)
        if target >= 0:
            state[target] = padded[1:]
    return out


def _state(state: torch.Tensor, source: int) -> torch.Tensor:
    return state[source] if source >= 0 else torch.zeros_like(state[0])


def _convolved(padded: torch.Tensor, weight: torch.Tensor, fixed: bool) -> torch.Tensor:
    """[R, C] float32 of rows [W - 1 + R, C]; the taps are summed in order."""
    rows = padded.shape[0] - weight.shape[1] + 1
    taps = weight.to(torch.float32)
    total = padded[:rows] * taps[:, 0]
    for j in range(1, weight.shape[1]):
        total = total + padded[j : j + rows] * taps[:, j]
    return pointwise.silu(total) if fixed else functional.silu(total)
