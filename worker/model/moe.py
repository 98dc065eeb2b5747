"""Layer kind: a routed mixture of experts whose weights come and go in the slot pool."""

from typing import Protocol

import torch
from torch.nn import functional

from copyengine.model_spec import MoeSpec
from kernels.topk_route import topk_route, topk_softmax
from worker.model.batch import Batch
from worker.model.mlp import DenseMlp
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

    def __init__(self, spec: MoeSpec, weights: Weights, prefix: str, bank: int, experts: Experts) -> None:
        self._spec = spec
        self._router = weights.pop(f"{prefix}.router")
        self._router_bias = weights.pop(f"{prefix}.router_bias") if spec.router_bias else None
        self._bank = bank
        self._experts = experts
        self._shared = SharedExpert(weights, prefix) if spec.shared_intermediate else None

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits = functional.linear(x, self._router, self._router_bias)
        if self._spec.softmax_chosen:
            weights, experts = topk_softmax(logits, self._spec.experts_per_token)
        else:
            weights, experts = topk_route(logits, self._spec.experts_per_token, self._spec.norm_topk_prob)
        routed = self._experts(self._bank, x, weights, experts)
        return routed + self._shared(x, batch) if self._shared else routed


class SharedExpert:
    """[T, H] -> [T, H]: sigmoid(gate(x)) * mlp(x)."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._mlp = DenseMlp(weights, f"{prefix}.shared")
        self._gate = weights.pop(f"{prefix}.shared_gate")

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return torch.sigmoid(functional.linear(x, self._gate)) * self._mlp(x, batch)
