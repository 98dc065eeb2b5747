# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: one program a token; its E keys stay in registers and their maximum is taken out K times.

A key is the probability's bits over the expert's number counted from above, so that no two are equal, and the order is
the reference's: by probability, then the lower expert. For 10 of 512 that is less work than any sort.
"""

from typing import Any

import torch
import triton
import triton.language as tl

TAKEN = tl.constexpr(-(2**63))


def topk_route(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    if tokens:
        arguments = {"RENORMALISE": renormalise, **launch_arguments(num_experts, k)}
        _topk_route[(tokens,)](logits, weights, experts, logits.stride(0), logits.stride(1), **arguments)
    return weights, experts


def topk_softmax(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    if tokens:
        arguments = launch_arguments(num_experts, k)
        _topk_softmax[(tokens,)](logits, weights, experts, logits.stride(0), logits.stride(1), **arguments)
    return weights, experts


def launch_arguments(num_experts: int, k: int) -> dict[str, Any]:
    block = max(32, triton.next_power_of_2(num_experts))
    return {
        "E": num_experts,
        "K": k,
        "BLOCK_E": block,
        "BLOCK_K": triton.next_power_of_2(k),
        "num_warps": 1 if block <= 512 else block // 512,  # in one warp a maximum needs no barrier
    }


@triton.jit
def _largest(keys, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_K]: the K largest keys in their order, and zeros."""
    place = tl.arange(0, BLOCK_K)
    chosen = tl.full((BLOCK_K,), 0, tl.int64)
    for k in range(K):
        best = tl.max(keys, axis=0)
        chosen = tl.where(place == k, best, chosen)
        keys = tl.where(keys == best, TAKEN, keys)
    return chosen


@triton.jit
def _topk_route(
    logits_ptr,
    weights_ptr,  # [T, K] float32
    experts_ptr,  # [T, K] int32
    token_stride,
    expert_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + token * token_stride + e * expert_stride, mask=e < E, other=float("-inf"))
    logits = logits.to(tl.float32)
    exponents = tl.exp(logits - tl.max(logits, axis=0))
    probabilities = tl.div_rn(exponents, tl.sum(exponents, axis=0))
    keys = (probabilities.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (E - 1 - e).to(tl.int64)
    chosen = _largest(tl.where(e < E, keys, TAKEN), K, BLOCK_K)
    place = tl.arange(0, BLOCK_K)
    weights = (chosen >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if RENORMALISE:
        weights = tl.div_rn(weights, tl.sum(weights, axis=0))  # places from K on hold zeros
    tl.store(weights_ptr + token * K + place, weights, mask=place < K)
    tl.store(experts_ptr + token * K + place, E - 1 - (chosen & 0xFFFFFFFF).to(tl.int32), mask=place < K)


@triton.jit
def _topk_softmax(
    logits_ptr,
    weights_ptr,  # [T, K] float32
    experts_ptr,  # [T, K] int32
    token_stride,
    expert_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + token * token_stride + e * expert_stride, mask=e < E, other=0).to(tl.float32)
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # like the floats
    keys = (ordered.to(tl.int64) << 32) | (E - 1 - e).to(tl.int64)
    chosen = _largest(tl.where(e < E, keys, TAKEN), K, BLOCK_K)

    place = tl.arange(0, BLOCK_K)
    bits = (chosen >> 32).to(tl.int32)
    best = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    best = tl.where(place < K, best, float("-inf"))
    exponents = tl.exp(best - tl.max(best, axis=0))
    weights = tl.div_rn(exponents, tl.sum(exponents, axis=0))
    tl.store(weights_ptr + token * K + place, weights, mask=place < K)
    tl.store(experts_ptr + token * K + place, E - 1 - (chosen & 0xFFFFFFFF).to(tl.int32), mask=place < K)
