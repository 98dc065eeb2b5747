"""Layer kind: multi-head latent attention, in its absorbed form over latents in the KV pages."""

import torch

from copyengine.model_spec import MlaSpec
from kernels.latent_attention import store_latent
from kernels.norm import rms_norm
from kernels.rope import norm_rope
from worker.kv import KvLayer
from worker.model.batch import Batch
from worker.model.operations import Operations
from worker.model.rotary import Rotary
from worker.model.stack import Weights

LATENT_NORM_EPS = 1e-6
"""Of the norms of both latents, whatever the model's own is (transformers' DeepseekV2Attention)."""


class MlaAttention:
    """[T, H] -> [T, H]; appends the step's latents and rotated key parts to its KV pages."""

    def __init__(
        self, spec: MlaSpec, weights: Weights, prefix: str, kv: KvLayer, rotary: Rotary, operations: Operations
    ) -> None:
        self._spec = spec
        self._kv = kv
        self._rotary = rotary
        self._operations = operations
        q_a_bias = weights.pop(f"{prefix}.q_a_bias") if spec.q_rank and spec.bias else None
        self._q_a = operations.linear(weights.pop(f"{prefix}.q_a"), q_a_bias) if spec.q_rank else None
        self._q_norm = weights.pop(f"{prefix}.q_a_norm") if spec.q_rank else None
        q = weights.pop(f"{prefix}.q_b" if spec.q_rank else f"{prefix}.q")
        self._q = operations.linear(self._halved(q.view(spec.heads, -1, q.shape[1]), spec.nope_dim).flatten(0, 1))
        bias = weights.pop(f"{prefix}.kv_a_bias") if spec.bias else None
        bias = None if bias is None else self._halved(bias[None, :, None], spec.rank)[0, :, 0]
        self._kv_a = operations.linear(self._halved(weights.pop(f"{prefix}.kv_a")[None], spec.rank)[0], bias)
        self._kv_norm = weights.pop(f"{prefix}.kv_a_norm")
        up = weights.pop(f"{prefix}.kv_b").view(spec.heads, -1, spec.rank)
        self._k_up = operations.heads_linear(up[:, : spec.nope_dim].contiguous())  # [heads, nope, R]
        self._v_up = operations.heads_linear(up[:, spec.nope_dim :].transpose(1, 2).contiguous())  # [heads, R, value]
        out_bias = weights.pop(f"{prefix}.o_bias") if spec.bias else None
        self._out = operations.linear(weights.pop(f"{prefix}.o"), out_bias)

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        spec = self._spec
        q = self._q(self._query_input(x)).view(x.shape[0], spec.heads, -1)
        kv = self._kv_a(x)[:, None]
        latent = rms_norm(kv[..., : spec.rank], self._kv_norm, LATENT_NORM_EPS)
        cos, sin = batch.once(self._rotary, lambda: self._rotary.cos_sin(batch.positions))
        q_rope, k_rope = norm_rope(q[..., spec.nope_dim :], kv[..., spec.rank :], None, None, 0.0, cos, sin)
        store_latent(latent, k_rope, self._kv.k, self._kv.v, batch.kv_pages, batch.kv_offsets)
        attended = self._attend(self._k_up(q[..., : spec.nope_dim]), q_rope, batch)
        return self._out(self._v_up(attended).reshape(x.shape[0], -1))

    def _query_input(self, x: torch.Tensor) -> torch.Tensor:
        """What q is made of: the normalised latent of its own, or x."""
        if self._q_a is None or self._q_norm is None:
            return x
        return rms_norm(self._q_a(x), self._q_norm, LATENT_NORM_EPS)

    def _attend(self, q: torch.Tensor, q_rope: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[T, heads, R] of q [T, heads, R] and q_rope [T, heads, P], once the step's latents are in their pages."""
        kept, scale = (self._kv.k, self._kv.v), self._spec.scale
        if batch.table is not None:
            return self._operations.decode_latent_attention(
                q, q_rope, *kept, batch.table.pages, batch.table.lengths, scale
            )
        latent_attention = self._operations.latent_attention
        rows = [
            latent_attention(q[part], q_rope[part], *kept, span.pages, span.start, scale)
            for span in batch.spans
            for part in (slice(span.first, span.first + span.rows),)
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _halved(self, rows: torch.Tensor, kept: int) -> torch.Tensor:
        """`rows` [heads, kept + P, ...] of a projection, those behind the first `kept` in the order of `norm_rope`.

        Rotated neighbours i, i + 1 become i / 2 and i / 2 + P / 2; q and k alike, so that their products stay.
        """
        if not self._spec.interleaved:
            return rows
        rotated = rows[:, kept:]
        return torch.cat([rows[:, :kept], rotated[:, 0::2], rotated[:, 1::2]], dim=1)
