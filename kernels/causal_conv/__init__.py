"""Causal depthwise convolution with SiLU, as recurrent layers have it before their recurrence.

The state of a sequence is its last W - 1 rows of x, oldest first; zeros stand for rows before its first.
"""

import torch

from kernels.causal_conv import ref
from kernels.state_pieces import Pieces

MAX_WIDTH = 8
"""W on a device."""


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, pieces: Pieces, fixed: bool = False
) -> torch.Tensor:
    """silu(sum over j of weight[:, j] * x[t - W + 1 + j]) of each row t, computed in float32: [T, C] like `x`.

    `x` is [T, C], `weight` [C, W], `state` [slots, W - 1, C] float32, strided by slot. The states of `pieces`' targets
    are written. If it is `fixed`, a row's bits depend on its sequence alone, as on a CUDA device they always do.
    ValueError for shapes or types that do not fit together.
    """
    _check(x, weight, state)
    if not x.is_cuda:
        return ref.causal_conv(x, weight, state, pieces, fixed)
    from kernels.causal_conv import tri

    return tri.causal_conv(x, weight, state, pieces)


def causal_conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    fixed: bool = False,
) -> torch.Tensor:
    """The same of one further row of each of B sequences: [B, C] like `x` [B, C].

    Row b goes on from state slot `sources[b]`, or from zeros if that is -1, and its state goes to slot `targets[b]`, or
    nowhere if that is -1; both [B] int32. `fixed` as for `causal_conv`. On a CUDA device it is one launch that a graph
    can hold.
    """
    _check(x, weight, state)
    if sources.shape != (x.shape[0],) or targets.shape != sources.shape:
        raise ValueError(f"sources {tuple(sources.shape)} and targets {tuple(targets.shape)} must be [{x.shape[0]}]")
    if not x.is_cuda:
        return ref.causal_conv_step(x, weight, state, sources, targets, fixed)
    from kernels.causal_conv import tri

    return tri.causal_conv_step(x, weight, state, sources, targets)


def _check(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> None:
    channels, width = weight.shape
    if x.ndim != 2 or x.shape[1] != channels or tuple(state.shape[1:]) != (width - 1, channels):
        raise ValueError(f"x {tuple(x.shape)} and state {tuple(state.shape)} do not fit weight {tuple(weight.shape)}")
    if state.dtype != torch.float32:
        raise ValueError(f"the state must be float32, not {state.dtype}")
    if x.is_cuda and not 2 <= width <= MAX_WIDTH:
        raise ValueError(f"a convolution must be 2 to {MAX_WIDTH} wide on a device, not {width}")
