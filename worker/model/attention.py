"""Layer kind: grouped-query attention with rotary embedding; optional q/k norm, clamp, biases, window, sinks, gate."""

import torch

from copyengine.model_spec import GqaSpec
from kernels.norm import rms_norm
from kernels.rope import norm_rope
from worker.kv import KvLayer
from worker.model.batch import Batch
from worker.model.operations import Operations
from worker.model.rotary import Rotary
from worker.model.stack import Weights


class GqaAttention:
    """[T, H] -> [T, H]; appends the step's keys and values to its KV pages."""

    def __init__(
        self,
        spec: GqaSpec,
        weights: Weights,
        prefix: str,
        kv: KvLayer,
        rotary: Rotary,
        eps: float,
        zero_centred: bool,
        operations: Operations,
    ) -> None:
        self._spec = spec
        self._kv = kv
        self._rotary = rotary
        self._eps = eps
        self._zero_centred = zero_centred
        self._operations = operations
        bias = torch.cat([weights.pop(f"{prefix}.{name}_bias") for name in "qkv"]) if spec.qkv_bias else None
        self._qkv = operations.linear(torch.cat([weights.pop(f"{prefix}.{name}") for name in "qkv"]), bias)
        out_bias = weights.pop(f"{prefix}.o_bias") if spec.o_bias else None
        self._out = operations.linear(weights.pop(f"{prefix}.o"), out_bias)
        self._sinks = weights.pop(f"{prefix}.sinks").to(torch.float32) if spec.sinks else None
        self._q_norm = weights.pop(f"{prefix}.q_norm") if spec.qk_norm else None
        self._k_norm = weights.pop(f"{prefix}.k_norm") if spec.qk_norm else None

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        q, k, v, gate = self._project(x)
        q_norm, k_norm = self._q_norm, self._k_norm
        if self._spec.wide_qk_norm:
            assert q_norm is not None and k_norm is not None
            q, k = self._wide_norm(q, q_norm), self._wide_norm(k, k_norm)
            q_norm = k_norm = None
        if self._spec.clip_qkv is not None:
            q, k, v = (part.clamp(-self._spec.clip_qkv, self._spec.clip_qkv) for part in (q, k, v))
        cos, sin = batch.once(self._rotary, lambda: self._rotary.cos_sin(batch.positions))
        q, k = norm_rope(q, k, q_norm, k_norm, self._eps, cos, sin, self._zero_centred)
        self._kv.append(k, v, batch.kv_pages, batch.kv_offsets)
        attended = self._attend(q, batch)
        if gate is not None:
            attended = attended * self._operations.sigmoid(gate).reshape(attended.shape)
        return self._out(attended)

    def _wide_norm(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Of all heads of a row at once: [T, heads, D]."""
        return rms_norm(heads.reshape(heads.shape[0], -1), weight, self._eps).view(heads.shape)

    def _attend(self, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[T, heads * D] of the rotated q [T, heads, D], once keys and values are in their pages."""
        scale, kv, kind = self._spec.head_dim**-0.5, self._kv, (self._spec.window, self._sinks)
        if batch.table is not None:
            return self._operations.decode_attention(
                q, kv.k, kv.v, batch.table.pages, batch.table.lengths, scale, *kind
            )
        attention = self._operations.attention
        rows = [
            attention(q[span.first : span.first + span.rows], kv.k, kv.v, span.pages, span.start, scale, *kind)
            for span in batch.spans
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q [T, heads, D], k and v [T, kv_heads, D] and the output's gate like q, if there is one: views of one
        product, before norms and rotation."""
        spec = self._spec
        heads = self._qkv(x).view(x.shape[0], -1, spec.head_dim)
        q_heads = spec.heads * 2 if spec.output_gate else spec.heads
        q, k, v = torch.split(heads, [q_heads, spec.kv_heads, spec.kv_heads], dim=1)
        return (q[:, 0::2], k, v, q[:, 1::2]) if spec.output_gate else (q, k, v, None)
