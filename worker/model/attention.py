"""Layer kind: grouped-query attention with rotary embedding, optional per-head q/k norm and optional biases."""

import torch
from torch.nn import functional

from copyengine.model_spec import GqaSpec
from kernels.attention import attention
from kernels.norm import rms_norm
from kernels.rope import apply_rope
from worker.kv import KvLayer
from worker.model.batch import Batch
from worker.model.rotary import Rotary
from worker.model.stack import Weights


class GqaAttention:
    """[T, H] -> [T, H]; appends the step's keys and values to its KV pages."""

    def __init__(self, spec: GqaSpec, weights: Weights, prefix: str, kv: KvLayer, rotary: Rotary, eps: float) -> None:
        self._spec = spec
        self._kv = kv
        self._rotary = rotary
        self._eps = eps
        self._qkv = torch.cat([weights.pop(f"{prefix}.{name}") for name in "qkv"])
        self._bias = torch.cat([weights.pop(f"{prefix}.{name}_bias") for name in "qkv"]) if spec.qkv_bias else None
        self._out = weights.pop(f"{prefix}.o")
        self._out_bias = weights.pop(f"{prefix}.o_bias") if spec.o_bias else None
        self._q_norm = weights.pop(f"{prefix}.q_norm") if spec.qk_norm else None
        self._k_norm = weights.pop(f"{prefix}.k_norm") if spec.qk_norm else None

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        q, k, v = self._project(x)
        cos, sin = self._rotary.cos_sin(batch.positions)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        self._kv.append(k, v, batch.kv_pages, batch.kv_offsets)
        scale = self._spec.head_dim**-0.5
        rows = [
            attention(q[span.first : span.first + span.rows], self._kv.k, self._kv.v, span.pages, span.start, scale)
            for span in batch.spans
        ]
        return functional.linear(torch.cat(rows), self._out, self._out_bias)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, D], k and v [T, kv_heads, D], before the rotation."""
        spec = self._spec
        heads = functional.linear(x, self._qkv, self._bias).view(x.shape[0], -1, spec.head_dim)
        q, k, v = torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = rms_norm(q, self._q_norm, self._eps), rms_norm(k, self._k_norm, self._eps)
        return q, k, v
