"""Plain torch, span by span, so that nothing depends on what else is in the step."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

from kernels.gated_delta.tokens import Gates, Tokens
from kernels.state_pieces import FIRST, ROWS, SOURCE, TARGET, Pieces

NORM_EPS = 1e-6
"""Added to the square of a length, as in transformers and the authors' own kernels."""


class Prepared(NamedTuple):
    """Rows of one sequence by value head, in the type that is computed in."""

    q: torch.Tensor  # [Hv, R, Dk], normalised and scaled
    k: torch.Tensor  # [Hv, R, Dk], normalised
    v: torch.Tensor  # [Hv, R, Dv]
    g: torch.Tensor  # [Hv, R] log of the decay
    beta: torch.Tensor  # [Hv, R]


def gated_delta(tokens: Tokens, gates: Gates, state: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    out = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    table, spans = pieces.table.tolist(), pieces.spans.tolist()
    for begin, end in pairwise(spans):
        s = _state(state, table[begin][SOURCE])
        for first, rows, target in ((p[FIRST], p[ROWS], p[TARGET]) for p in table[begin:end]):
            if rows:
                prepared = prepare(Tokens(*(x[first : first + rows] for x in tokens)), gates)
                computed, s = chunk(prepared, s)
                out[first : first + rows] = computed.transpose(0, 1).to(out.dtype)
            if target >= 0:
                state[target] = s
    return out


def gated_delta_step(
    tokens: Tokens, gates: Gates, state: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    for row, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        prepared = prepare(Tokens(*(x[row : row + 1] for x in tokens)), gates)
        computed, s = recurrence(prepared, _state(state, source))
        out[row] = computed[:, 0].to(out.dtype)
        if target >= 0:
            state[target] = s
    return out


def prepare(tokens: Tokens, gates: Gates, dtype: torch.dtype = torch.float32) -> Prepared:
    """The rows in `dtype`."""
    q, k, v, a, b = (x.to(dtype).transpose(0, 1) for x in tokens)
    q, k = (_normalised(x).repeat_interleave(v.shape[0] // x.shape[0], dim=0) for x in (q, k))
    g = -gates.a_log.to(dtype).exp()[:, None] * functional.softplus(a + gates.dt_bias.to(dtype)[:, None])
    return Prepared(q * q.shape[-1] ** -0.5, k, v, g, b.sigmoid())


def recurrence(rows: Prepared, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, the definition: out [Hv, R, Dv], and the state [Hv, Dk, Dv] after them."""
    outs = []
    for t in range(rows.q.shape[1]):
        q, k, v, g, beta = (x[:, t] for x in rows)
        state = state * g.exp()[:, None, None]
        delta = beta[:, None] * (v - (k[:, :, None] * state).sum(dim=1))
        state = state + k[:, :, None] * delta[:, None, :]
        outs.append((q[:, :, None] * state).sum(dim=1))
    return torch.stack(outs, dim=1), state


def chunk(rows: Prepared, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of all rows at once. With G the running sum of g, what row i puts into the state, u[i], solves

    u[i] + beta[i] sum over j < i of exp(G[i] - G[j]) (k[i] k[j]) u[j] = beta[i] (v[i] - exp(G[i]) k[i] S).
    """
    count = rows.q.shape[1]
    total = rows.g.cumsum(dim=1)
    later = torch.ones(count, count, dtype=torch.bool, device=state.device).triu(1)
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(later, -torch.inf).exp()
    reach = total.exp()[:, :, None]  # of the old state
    system = rows.beta[:, :, None] * (rows.k @ rows.k.mT) * decay
    right = rows.beta[:, :, None] * (rows.v - reach * (rows.k @ state))
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = reach * (rows.q @ state) + ((rows.q @ rows.k.mT) * decay) @ u
    left = (total[:, -1:] - total).exp()[:, :, None]  # of each row's part at the end
    return out, total[:, -1].exp()[:, None, None] * state + (rows.k * left).mT @ u


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + NORM_EPS)


def _state(state: torch.Tensor, source: int) -> torch.Tensor:
    """A copy, in an allocation of its own: MKL's products depend on where an operand starts, which differs by slot."""
    return state[source].clone() if source >= 0 else torch.zeros_like(state[0])
