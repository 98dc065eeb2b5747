"""The operations of a model of which there are two kinds: the fastest ones, and those of a fixed order of sums.

Of the second kind a row has the same bits whatever else is in its step, wherever its prompt was cut and whether it was
prefilled or decoded. All other operations are so anyway: they compute rows one by one. A model is built of one kind or
the other, which is the whole difference between the two (beside its experts', who come with the slots).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from kernels import pointwise
from kernels.attention import attention, decode_attention
from kernels.causal_conv import causal_conv, causal_conv_step
from kernels.latent_attention import decode_latent_attention, latent_attention
from kernels.linear import heads_linear, linear, rows_at_once
from kernels.norm import gated_rms_norm
from kernels.sampling import RowLogprobs, logprobs
from kernels.topk_route import grouped_route

Map = Callable[[torch.Tensor], torch.Tensor]
"""Of rows to rows."""


class MakeLinear(Protocol):
    """Makes [T, K] -> [T, N] of a weight [N, K], and a bias [N] if there is one."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Map: ...


class Operations(NamedTuple):
    """Functions of the packages they are named after, but for the first two."""

    linear: MakeLinear
    heads_linear: Callable[[torch.Tensor], Map]  # [heads, A, B] to what makes [T, heads, B] of [T, heads, A]
    sigmoid: Map
    silu: Map
    attention: Callable[..., torch.Tensor]
    decode_attention: Callable[..., torch.Tensor]
    latent_attention: Callable[..., torch.Tensor]
    decode_latent_attention: Callable[..., torch.Tensor]
    causal_conv: Callable[..., torch.Tensor]
    causal_conv_step: Callable[..., torch.Tensor]
    gated_rms_norm: Callable[..., torch.Tensor]
    grouped_route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    logprobs: Callable[[torch.Tensor, torch.Tensor, int], RowLogprobs]


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Map:
    return lambda x: functional.linear(x, weight, bias)


def _heads_linear(weight: torch.Tensor) -> Map:
    return lambda x: torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def _fixed_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Map:
    rows = rows_at_once(weight, bias)
    return lambda x: linear(x, weight, bias, rows)


def _fixed_heads_linear(weight: torch.Tensor) -> Map:
    rows = rows_at_once(weight)
    return lambda x: heads_linear(x, weight, rows)


PLAIN = Operations(
    _linear,
    _heads_linear,
    torch.sigmoid,
    functional.silu,
    attention,
    decode_attention,
    latent_attention,
    decode_latent_attention,
    causal_conv,
    causal_conv_step,
    gated_rms_norm,
    grouped_route,
    logprobs,
)
"""What is fastest for a step of its size."""

FIXED = Operations(
    _fixed_linear,
    _fixed_heads_linear,
    pointwise.sigmoid,
    pointwise.silu,
    partial(attention, fixed=True),
    partial(decode_attention, fixed=True),
    partial(latent_attention, fixed=True),
    partial(decode_latent_attention, fixed=True),
    partial(causal_conv, fixed=True),
    partial(causal_conv_step, fixed=True),
    partial(gated_rms_norm, fixed=True),
    partial(grouped_route, fixed=True),
    partial(logprobs, fixed=True),
)
"""Of a fixed order of sums. A recurrent state that a prefill has computed in pieces is that of prefills cut at the same
pieces' ends, not that of decode steps: see kernels.state_pieces."""


def operations(deterministic: bool) -> Operations:
    """Those of the kind that is asked for."""
    return FIXED if deterministic else PLAIN
