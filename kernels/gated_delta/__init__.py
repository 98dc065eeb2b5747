"""The gated delta rule (Yang et al., Gated Delta Networks, 2412.06464): a linear attention with a decaying state.

Per value head, with q and k normalised to length 1 and q scaled by Dk ** -0.5, the state S [Dk, Dv] takes in a token by

    S <- exp(g) S;    S <- S + k (beta (v - k S));    out = q S,

where g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b). All of it is computed in float32.
"""

import torch

from kernels.gated_delta import ref
from kernels.gated_delta.tokens import Gates, Tokens
from kernels.state_pieces import Pieces

__all__ = ["MAX_DIM", "Gates", "Tokens", "gated_delta", "gated_delta_step"]

MAX_DIM = 128
"""Dk and Dv on a device."""


def gated_delta(tokens: Tokens, gates: Gates, state: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """out of every row, [T, Hv, Dv] of v's type, piece by piece in the chunked form (section 3.2 there).

    `state` [slots, Hv, Dk, Dv] float32, strided by slot, is read at the spans' sources and written at the pieces'
    targets. A span's bits depend on its own rows and pieces alone. ValueError for shapes or types that do not fit.
    """
    _check(tokens, gates, state)
    if not tokens.v.is_cuda:
        return ref.gated_delta(tokens, gates, state, pieces)
    from kernels.gated_delta import tri

    return tri.gated_delta(tokens, gates, state, pieces)


def gated_delta_step(
    tokens: Tokens, gates: Gates, state: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The same of one further row of each of T sequences, in the recurrent form.

    Row t goes on from state slot `sources[t]`, or from zeros if that is -1, and its state goes to slot `targets[t]`, or
    nowhere if that is -1; both [T] int32. On a CUDA device it is one launch that a graph can hold.
    """
    _check(tokens, gates, state)
    if sources.shape != (tokens.v.shape[0],) or targets.shape != sources.shape:
        raise ValueError(f"sources {tuple(sources.shape)} and targets {tuple(targets.shape)} must be [T]")
    if not tokens.v.is_cuda:
        return ref.gated_delta_step(tokens, gates, state, sources, targets)
    from kernels.gated_delta import tri_step

    return tri_step.gated_delta_step(tokens, gates, state, sources, targets)


def _check(tokens: Tokens, gates: Gates, state: torch.Tensor) -> None:
    rows, key_heads, k_dim = tokens.k.shape
    _, heads, v_dim = tokens.v.shape
    shapes = [tuple(x.shape) for x in (*tokens, *gates)]
    wanted = [(rows, key_heads, k_dim)] * 2 + [(rows, heads, v_dim), *[(rows, heads)] * 2, (heads,), (heads,)]
    if shapes != wanted or heads % key_heads or tuple(state.shape[1:]) != (heads, k_dim, v_dim):
        raise ValueError(f"shapes {shapes} and state {tuple(state.shape)} do not fit together")
    if state.dtype != torch.float32:
        raise ValueError(f"the state must be float32, not {state.dtype}")
    if tokens.v.is_cuda and max(k_dim, v_dim) > MAX_DIM:
        raise ValueError(f"heads can have {MAX_DIM} elements at most on a device, not {max(k_dim, v_dim)}")
