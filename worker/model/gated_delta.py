"""Layer kind: gated DeltaNet, whose sequences have a state of fixed size in place of keys and values."""

import torch

from copyengine.model_spec import GatedDeltaSpec
from kernels.gated_delta import Gates, Tokens, gated_delta, gated_delta_step
from worker.model.batch import Batch, StateRows
from worker.model.operations import Operations
from worker.model.stack import Weights
from worker.state import StateLayer


class GatedDelta:
    """[T, H] -> [T, H]; takes the step's tokens into the states of its sequences."""

    def __init__(
        self,
        spec: GatedDeltaSpec,
        weights: Weights,
        prefix: str,
        state: StateLayer,
        eps: float,
        operations: Operations,
    ) -> None:
        self._spec = spec
        self._state = state
        self._eps = eps
        self._operations = operations
        self._in = operations.linear(_input_rows(spec, weights, prefix))
        self._conv = weights.pop(f"{prefix}.conv").squeeze(1)
        self._gates = Gates(weights.pop(f"{prefix}.a_log"), weights.pop(f"{prefix}.dt_bias"))
        self._norm = weights.pop(f"{prefix}.gated_norm")
        self._out = operations.linear(weights.pop(f"{prefix}.o"))

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        spec, states, operations = self._spec, batch.states, self._operations
        rows = self._in(x)
        value = spec.v_heads * spec.v_dim
        mixed, z, b, a = torch.split(rows, [spec.conv_channels, value, spec.v_heads, spec.v_heads], dim=1)
        if isinstance(states, StateRows):
            slots = (states.sources, states.targets)
            mixed = operations.causal_conv_step(mixed, self._conv, self._state.conv, *slots)
            tokens = self._tokens(mixed, a, b)
            out = gated_delta_step(tokens, self._gates, self._state.recurrent, *slots)
        else:
            assert states is not None
            mixed = operations.causal_conv(mixed, self._conv, self._state.conv, states)
            out = gated_delta(self._tokens(mixed, a, b), self._gates, self._state.recurrent, states)
        out = operations.gated_rms_norm(out, _heads(z, spec.v_heads), self._norm, self._eps)
        return self._out(out.flatten(1))

    def _tokens(self, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Tokens:
        """Of the convolution's rows [T, C]."""
        spec = self._spec
        keys = spec.k_heads * spec.k_dim
        q, k, v = torch.split(mixed, [keys, keys, spec.v_heads * spec.v_dim], dim=1)
        return Tokens(_heads(q, spec.k_heads), _heads(k, spec.k_heads), _heads(v, spec.v_heads), a, b)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[T, heads, D] of [T, heads * D], with the same strides for any T: a view of one row would get other ones, and a
    kernel that is compiled for them might add in another order."""
    width = x.shape[1] // heads
    return x.as_strided((x.shape[0], heads, width), (x.stride(0), width, 1))


def _input_rows(spec: GatedDeltaSpec, weights: Weights, prefix: str) -> torch.Tensor:
    """One projection to q, k and v of all heads, then z, b and a: [C + Hv * Dv + 2 Hv, H]."""
    if not spec.grouped:
        return torch.cat([weights.pop(f"{prefix}.{name}") for name in ("qkv", "z", "b", "a")])
    hidden = weights[f"{prefix}.qkvz"].shape[1]
    shared = spec.v_heads // spec.k_heads  # value heads of a key head
    value = shared * spec.v_dim
    qkvz = weights.pop(f"{prefix}.qkvz").reshape(spec.k_heads, -1, hidden)
    ba = weights.pop(f"{prefix}.ba").reshape(spec.k_heads, -1, hidden)
    parts = [*torch.split(qkvz, [spec.k_dim, spec.k_dim, value, value], dim=1), *torch.split(ba, shared, dim=1)]
    return torch.cat([part.flatten(0, 1) for part in parts])
