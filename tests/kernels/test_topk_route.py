"""topk_route against numpy in float64 and a brute-force pick; the Triton kernel against that and the reference."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.topk_route import topk_route, topk_softmax

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (8, 4), (128, 4), (129, 129)])
def test_a_softmax_over_the_chosen_alone(num_experts: int, k: int) -> None:
    """Against float64, with logits so far apart that the others' probabilities are 0 in float32, and with ties."""
    for spread in (3.0, 300.0):
        logits = (torch.randn(33, num_experts, generator=torch.Generator().manual_seed(k)) * spread).round(decimals=1)
        logits[0] = torch.tensor([-0.0, 0.0]).repeat(num_experts)[:num_experts]
        weights, experts = topk_softmax(logits, k)
        chosen = [sorted(range(num_experts), key=lambda e: (-row[e], e))[:k] for row in logits.tolist()]
        assert experts.dtype == torch.int32 and experts.tolist() == chosen
        expected = torch.softmax(logits.double().gather(1, torch.tensor(chosen)), dim=1)
        torch.testing.assert_close(weights.double(), expected, atol=1e-9, rtol=2e-6)


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


def test_the_triton_kernel_in_the_interpreter() -> None:
    """Against the reference, with many ties; what is not a number still goes to experts that there are."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_topk_route"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (60, 4), (512, 10), (4096, 32)])
def test_the_triton_kernel_compiles_for_hopper(num_experts: int, k: int) -> None:
    """Against the shared memory and registers of sm_90."""
    pytest.importorskip("triton")
    from kernels.topk_route import tri
    from tests.kernels.compiled_for import expect_fits

    types = {"weights_ptr": "*fp32", "experts_ptr": "*i32", "token_stride": "i32", "expert_stride": "i32"}
    for dtype in ("*bf16", "*fp32"):
        arguments = tri.launch_arguments(num_experts, k)
        expect_fits(tri._topk_route, types | {"logits_ptr": dtype}, {"RENORMALISE": True, **arguments})
        expect_fits(tri._topk_softmax, types | {"logits_ptr": dtype}, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_experts", "k", "dtype"),
    [
        (1, 1, torch.float32),
        (2, 2, torch.float32),
        (60, 4, torch.bfloat16),
        (127, 8, torch.float32),
        (128, 8, torch.float32),
        (129, 32, torch.float32),
        (512, 10, torch.float32),
        (512, 10, torch.bfloat16),
        (512, 10, torch.float16),
        (513, 10, torch.float32),
        (4096, 32, torch.bfloat16),
    ],
)
def test_the_device_s_routes_are_those_of_float64(num_experts: int, k: int, dtype: torch.dtype) -> None:
    """Against float64: the weights are those of the experts named, and no expert left out is likelier than one named.

    Experts whose probabilities float32 cannot tell apart may stand in either order.
    """
    for tokens, renormalise in itertools.product((0, 1, 3, 129, 1324), (False, True)):
        generator = torch.Generator().manual_seed(num_experts)
        logits = (torch.randn(tokens, num_experts, generator=generator) * 3).to(dtype).cuda()
        weights, experts = topk_route(logits, k, renormalise)
        assert weights.shape == experts.shape == (tokens, k)
        exact = torch.softmax(logits.double(), dim=1)
        named = exact.gather(1, experts.long())
        best = exact.topk(k, dim=1).values
        assert all(len(set(row)) == k for row in experts.tolist())
        torch.testing.assert_close(named, best, atol=1e-9, rtol=1e-5)
        expected = named / named.sum(1, keepdim=True) if renormalise else named
        torch.testing.assert_close(weights.double(), expected, atol=1e-9, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (32, 4), (128, 4), (129, 32), (4096, 32)])
def test_the_device_s_softmax_over_the_chosen_is_the_reference_s(num_experts: int, k: int, dtype: torch.dtype) -> None:
    """Against the reference on the CPU: the same experts, and weights within rounding."""
    for tokens in (0, 1, 129):
        logits = (torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(k)) * 4).to(dtype)
        for values in (logits, logits.round()):
            weights, experts = topk_softmax(values.cuda(), k)
            expected = topk_softmax(values, k)
            assert torch.equal(experts.cpu(), expected[1])
            torch.testing.assert_close(weights.cpu(), expected[0], atol=1e-7, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "k"), [(40, 8), (512, 10), (2100, 32)])
def test_the_device_gives_equal_logits_to_the_lower_expert(num_experts: int, k: int) -> None:
    """Against the reference on the CPU, on logits that are mostly ties: the experts are equal, and so alone."""
    logits = torch.randint(-2, 3, (200, num_experts), generator=torch.Generator().manual_seed(k)).to(torch.bfloat16)
    weights, experts = topk_route(logits.cuda(), k, True)
    assert torch.equal(experts.cpu(), topk_route(logits, k, True)[1])
    alone = topk_route(logits[7:8].cuda(), k, True)
    assert torch.equal(alone[0], weights[7:8]) and torch.equal(alone[1], experts[7:8])


@pytest.mark.gpu
def test_the_device_names_experts_that_there_are_also_for_logits_that_are_not_numbers() -> None:
    """Against the docstring, and its limits."""
    for bad in (float("nan"), float("inf"), float("-inf")):
        logits = torch.zeros(2, 40, device="cuda")
        logits[0], logits[1, :3] = bad, bad
        for row in topk_route(logits, 8, True)[1].tolist():
            assert len(set(row)) == 8 and 0 <= min(row) <= max(row) < 40
    for num_experts, k in ((4097, 1), (64, 33)):
        with pytest.raises(ValueError, match="k must be at most 32 of 4096"):
            topk_route(torch.zeros(1, num_experts, device="cuda"), k, True)
