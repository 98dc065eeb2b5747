# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: routing by sigmoids among groups of experts, one program a token, all in registers.

A group is a row of a tile, so that its two largest values and the mask of the groups not taken are reductions along it.
Keys are the reference's: the order of the float, then the lower expert or group.
"""

from typing import Any

import torch
import triton
import triton.language as tl

TAKEN = tl.constexpr(-(2**63))


def grouped_route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    groups: int,
    groups_per_token: int,
    renormalise: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    if tokens:
        arguments = launch_arguments(num_experts, k, groups, groups_per_token, renormalise)
        strides = (logits.stride(0), logits.stride(1))
        _grouped_route[(tokens,)](logits, bias.contiguous(), weights, experts, *strides, scale, **arguments)
    return weights, experts


def launch_arguments(num_experts: int, k: int, groups: int, groups_per_token: int, renormalise: bool) -> dict[str, Any]:
    members = num_experts // groups
    block = triton.next_power_of_2(groups) * triton.next_power_of_2(members)
    return {
        "GROUPS": groups,
        "GROUPS_TAKEN": groups_per_token,
        "MEMBERS": members,
        "K": k,
        "RENORMALISE": renormalise,
        "BLOCK_G": triton.next_power_of_2(groups),
        "BLOCK_M": triton.next_power_of_2(members),
        "BLOCK_K": triton.next_power_of_2(k),
        "num_warps": min(8, max(1, block // 512)),
    }


@triton.jit
def _keys(values, places, COUNT: tl.constexpr):
    """int64 keys in the order of float32 `values`, equals broken towards the lower place."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (COUNT - 1 - places).to(tl.int64)


@triton.jit
def _grouped_route(
    logits_ptr,
    bias_ptr,  # [E] float32
    weights_ptr,  # [T, K] float32
    experts_ptr,  # [T, K] int32
    token_stride,
    expert_stride,
    scale,
    GROUPS: tl.constexpr,
    GROUPS_TAKEN: tl.constexpr,
    MEMBERS: tl.constexpr,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M)
    e = group[:, None] * MEMBERS + member[None, :]
    there = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    row = logits_ptr + token * token_stride
    logits = tl.load(row + e * expert_stride, mask=there, other=0).to(tl.float32)
    scores = tl.where(there, tl.sigmoid(logits), 0.0)  # e repeats where there is none
    choice = scores + tl.load(bias_ptr + e, mask=there, other=0)
    keys = tl.where(there, _keys(choice, e, GROUPS * MEMBERS), TAKEN)
    if GROUPS_TAKEN < GROUPS:
        first = tl.max(keys, axis=1)
        second = tl.max(tl.where(keys == first[:, None], TAKEN, keys), axis=1)
        largest = tl.sum(tl.where(keys == first[:, None], choice, 0.0), axis=1)
        next_largest = tl.sum(tl.where(keys == second[:, None], choice, 0.0), axis=1)
        of_groups = tl.where(group < GROUPS, _keys(largest + next_largest, group, GROUPS), TAKEN)
        taken = tl.zeros((BLOCK_G,), tl.int32)
        for _ in range(GROUPS_TAKEN):
            best = tl.max(of_groups, axis=0)
            taken = tl.where(of_groups == best, 1, taken)
            of_groups = tl.where(of_groups == best, TAKEN, of_groups)
        keys = tl.where((taken > 0)[:, None], keys, TAKEN)

    place = tl.arange(0, BLOCK_K)
    experts = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for k in range(K):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        expert = GROUPS * MEMBERS - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        score = tl.sum(tl.sum(tl.where(e == expert, scores, 0.0), axis=1), axis=0)
        experts = tl.where(place == k, expert, experts)
        weights = tl.where(place == k, score, weights)
        keys = tl.where(keys == best, TAKEN, keys)
    if RENORMALISE:
        weights = tl.div_rn(weights, tl.sum(weights, axis=0) + 1e-20)
    tl.store(weights_ptr + token * K + place, weights * scale, mask=place < K)
    tl.store(experts_ptr + token * K + place, experts, mask=place < K)
