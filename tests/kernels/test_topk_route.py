"""topk_route against numpy in float64 and a brute-force pick."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.topk_route import topk_route


def brute_force(logits: np.ndarray, k: int, renormalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """Expert by expert: the most likely that is not taken yet, the lower one of equals."""
    wide = logits.astype(np.float64)
    exponents = np.exp(wide - wide.max(axis=1, keepdims=True, initial=-np.inf))
    probabilities = exponents / exponents.sum(axis=1, keepdims=True)
    chosen = [sorted(range(logits.shape[1]), key=lambda e: (-row[e], e))[:k] for row in wide]
    experts = np.array(chosen, np.int32).reshape(-1, k)
    weights = np.take_along_axis(probabilities, experts.astype(np.int64), axis=1)
    return weights / weights.sum(axis=1, keepdims=True) if renormalise else weights, experts


@pytest.mark.parametrize("tokens", [0, 1, 3, 129])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (2, 2), (8, 1), (60, 2), (127, 8), (128, 8), (129, 129)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_weights_and_experts_are_those_of_a_brute_force_pick(
    tokens: int, num_experts: int, k: int, renormalise: bool
) -> None:
    logits = torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(num_experts)) * 3
    weights, experts = topk_route(logits, k, renormalise)
    expected_weights, expected_experts = brute_force(logits.numpy(), k, renormalise)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int32
    np.testing.assert_array_equal(experts.numpy(), expected_experts)
    np.testing.assert_allclose(weights.numpy(), expected_weights, rtol=2e-6)


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=40), st.data())
def test_equal_logits_go_to_the_lower_expert(values: list[int], data: st.DataObject) -> None:
    """Against the brute force, on logits that are mostly ties."""
    k = data.draw(st.integers(1, len(values)))
    logits = torch.tensor([values], dtype=torch.bfloat16)
    _, experts = topk_route(logits, k, False)
    np.testing.assert_array_equal(experts.numpy(), brute_force(logits.float().numpy(), k, False)[1])


def test_a_type_narrower_than_float32_is_widened_first() -> None:
    """Against the same logits given as float32: the softmax must not run in bfloat16."""
    narrow = torch.randn(33, 60, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for ours, wide in zip(topk_route(narrow, 4, True), topk_route(narrow.float(), 4, True), strict=True):
        assert torch.equal(ours, wide)


@pytest.mark.parametrize(
    ("logits", "k"),
    [
        (torch.zeros(2, 4), 0),
        (torch.zeros(2, 4), 5),
        (torch.zeros(4), 1),
        (torch.zeros(2, 4, dtype=torch.int32), 1),
    ],
)
def test_impossible_arguments_are_refused(logits: torch.Tensor, k: int) -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match=r"k must|logits must"):
        topk_route(logits, k, False)
