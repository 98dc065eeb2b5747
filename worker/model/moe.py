"""Layer kind: a routed mixture of experts whose weights come and go in the slot pool."""

from typing import Protocol

import torch

from copyengine.model_spec import MoeSpec
from kernels.topk_route import topk_route, topk_softmax
from worker.model.batch import Batch
from worker.model.mlp import DenseMlp
from worker.model.operations import Operations
from worker.model.stack import Weights


class Experts(Protocol):
    """The experts of all MoE layers, wherever they are."""

    def __call__(self, layer: int, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Of bank `layer`: the sum over k of weights[t, k] * expert[experts[t, k]](x[t]), in the order of k.

        `x` [T, H], `weights` [T, K] float32, `experts` [T, K] int32; returns [T, H] like x. Once per layer and step, in
        ascending order of the layers.
        """
        ...


class MoeFfn:
    """[T, H] -> [T, H]: the weighted sum of each token's K experts, plus that of the shared expert if there is one."""

    def __init__(
        self, spec: MoeSpec, weights: Weights, prefix: str, bank: int, experts: Experts, operations: Operations
    ) -> None:
        self._spec = spec
        router = weights.pop(f"{prefix}.score_router" if spec.grouped else f"{prefix}.router")
        self._router = operations.linear(router, weights.pop(f"{prefix}.router_bias") if spec.router_bias else None)
        self._grouped_route = operations.grouped_route
        self._score_bias = weights.pop(f"{prefix}.score_bias") if spec.grouped else None
        self._bank = bank
        self._experts = experts
        self._shared = SharedExpert(weights, prefix, spec.shared_gate, operations) if spec.shared_intermediate else None

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        weights, experts = self._route(x)
        routed = self._experts(self._bank, x, weights, experts)
        return routed + self._shared(x, batch) if self._shared else routed

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, K] float32 and experts [T, K] int32 of the rows of x."""
        spec, grouped = self._spec, self._spec.grouped
        k, renormalise = spec.experts_per_token, spec.norm_topk_prob
        if grouped is None or self._score_bias is None:
            logits = self._router(x)
            return topk_softmax(logits, k) if spec.softmax_chosen else topk_route(logits, k, renormalise)
        logits = self._router(x.to(torch.float32))
        groups = (grouped.groups, grouped.groups_per_token)
        return self._grouped_route(logits, self._score_bias, k, *groups, renormalise, grouped.scale)


class SharedExpert:
    """[T, H] -> [T, H]: sigmoid(gate(x)) * mlp(x), or without a gate mlp(x)."""

    def __init__(self, weights: Weights, prefix: str, gated: bool, operations: Operations) -> None:
        self._mlp = DenseMlp(weights, f"{prefix}.shared", operations)
        self._gate = operations.linear(weights.pop(f"{prefix}.shared_gate")) if gated else None
        self._sigmoid = operations.sigmoid

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        out = self._mlp(x, batch)
        return out if self._gate is None else self._sigmoid(self._gate(x)) * out
