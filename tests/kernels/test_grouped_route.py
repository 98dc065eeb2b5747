"""grouped_route against a brute-force pick in numpy; the Triton kernel against the reference."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.topk_route import grouped_route

ROOT = Path(__file__).parents[2]


def brute_force(choice: np.ndarray, k: int, groups: int, taken: int) -> np.ndarray:
    """[T, K]: group by group and expert by expert, the largest that is left, the lower one of equals."""
    chosen = []
    for row in choice:
        members = row.reshape(groups, -1)
        worth = [np.float32(sum(sorted(group, reverse=True)[:2])) for group in members]
        best = sorted(range(groups), key=lambda g: (-worth[g], g))[:taken]
        allowed = [e for e in range(row.size) if e // members.shape[1] in best]
        chosen.append(sorted(allowed, key=lambda e: (-row[e], e))[:k])
    return np.array(chosen, np.int32).reshape(-1, k)


def check(logits: torch.Tensor, bias: torch.Tensor, k: int, groups: int, taken: int) -> None:
    scores = torch.sigmoid(logits.float())
    expected = brute_force((scores + bias).numpy(), k, groups, taken)
    for renormalise in (False, True):
        weights, experts = grouped_route(logits, bias, k, groups, taken, renormalise, 2.5)
        assert weights.dtype == torch.float32 and experts.dtype == torch.int32
        np.testing.assert_array_equal(experts.numpy(), expected)
        exact = np.take_along_axis(scores.double().numpy(), expected.astype(np.int64), axis=1)
        exact = exact / (exact.sum(axis=1, keepdims=True) + 1e-20) if renormalise else exact
        np.testing.assert_allclose(weights.numpy(), 2.5 * exact, rtol=2e-6)


@pytest.mark.parametrize("tokens", [0, 1, 129])
@pytest.mark.parametrize(
    ("num_experts", "k", "groups", "taken"),
    [(2, 1, 1, 1), (8, 8, 1, 1), (8, 2, 4, 1), (60, 6, 3, 2), (256, 8, 8, 4), (6, 4, 6, 6)],
)
def test_weights_and_experts_are_those_of_a_brute_force_pick(
    tokens: int, num_experts: int, k: int, groups: int, taken: int
) -> None:
    """With biases that lift some experts over others and are no part of the weights."""
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(tokens, num_experts, generator=generator) * 3
    check(logits, torch.randn(num_experts, generator=generator), k, groups, taken)
    check(logits.to(torch.bfloat16), torch.zeros(num_experts), k, groups, taken)


@given(st.lists(st.integers(-2, 2), min_size=12, max_size=12), st.data())
def test_equals_go_to_the_lower_group_and_expert(values: list[int], data: st.DataObject) -> None:
    """Against the brute force, on values that are mostly ties, of either sign."""
    groups = data.draw(st.sampled_from((1, 2, 3, 4, 6)))
    taken = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, 12 // groups * taken))
    bias = torch.tensor(data.draw(st.lists(st.sampled_from((-2.0, -0.5, 0.0)), min_size=12, max_size=12)))
    check(torch.tensor([values], dtype=torch.float32), bias, k, groups, taken)


@pytest.mark.parametrize(
    ("k", "groups", "taken", "bias", "match"),
    [
        (0, 2, 1, torch.zeros(8), "k must be in 1..4"),
        (5, 2, 1, torch.zeros(8), "k must be in 1..4"),
        (1, 3, 1, torch.zeros(8), "groups do not fit"),
        (1, 2, 3, torch.zeros(8), "groups do not fit"),
        (1, 8, 1, torch.zeros(8), "groups do not fit"),
        (1, 2, 1, torch.zeros(7), "bias must be"),
        (1, 2, 1, torch.zeros(8, dtype=torch.bfloat16), "bias must be"),
    ],
)
def test_impossible_arguments_are_refused(k: int, groups: int, taken: int, bias: torch.Tensor, match: str) -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match=match):
        grouped_route(torch.zeros(2, 8), bias, k, groups, taken, False, 1.0)


def test_the_triton_kernel_in_the_interpreter() -> None:
    """Against the reference, with many ties; what is not a number still goes to experts that there are."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_grouped_route"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("capability", [80, 90])
def test_the_triton_kernel_compiles(capability: int) -> None:
    """Against shared memory and registers, for DeepSeek-V3, for Kimi-K2, and for the largest E and K."""
    pytest.importorskip("triton")
    from kernels.topk_route import grouped_tri
    from tests.kernels.compiled_for import expect_fits

    types = {"logits_ptr": "*fp32", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "experts_ptr": "*i32"}
    types |= {"token_stride": "i32", "expert_stride": "i32", "scale": "fp32"}
    for experts, k, groups, taken in ((256, 8, 8, 4), (384, 8, 1, 1), (4096, 32, 8, 4)):
        arguments = grouped_tri.launch_arguments(experts, k, groups, taken, True)
        expect_fits(grouped_tri._grouped_route, types, arguments, capability)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_experts", "k", "groups", "taken"),
    [(8, 2, 4, 1), (60, 6, 3, 2), (256, 8, 8, 4), (384, 8, 1, 1), (4096, 32, 8, 4)],
)
def test_the_device_picks_the_reference_s_experts(num_experts: int, k: int, groups: int, taken: int) -> None:
    """Against the reference on the CPU, whose sigmoid may differ in the last bit: few experts with a bias, which leaves
    none so near another, and many without, equal or well apart; and a row alone."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randint(0, 4, (200, num_experts), generator=generator).float()
    bias = torch.randn(num_experts, generator=generator) * 0.3 if num_experts < 100 else torch.zeros(num_experts)
    weights, experts = grouped_route(logits.cuda(), bias.cuda(), k, groups, taken, True, 2.5)
    expected_weights, expected = grouped_route(logits, bias, k, groups, taken, True, 2.5)
    assert torch.equal(experts.cpu(), expected)
    torch.testing.assert_close(weights.cpu(), expected_weights, atol=1e-7, rtol=1e-5)
    alone = grouped_route(logits[7:8].cuda(), bias.cuda(), k, groups, taken, True, 2.5)
    assert torch.equal(alone[0], weights[7:8]) and torch.equal(alone[1], experts[7:8])
