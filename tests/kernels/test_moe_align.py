"""moe_align against a brute-force sort."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.moe_align import moe_align


def check(experts: torch.Tensor, num_experts: int) -> None:
    """`routes` by expert, then by route; `offsets` cut them expert by expert."""
    alignment = moe_align(experts, num_experts)
    flat = experts.flatten().tolist()
    assert alignment.routes.dtype == torch.int32 and alignment.offsets.dtype == torch.int32
    assert alignment.routes.tolist() == sorted(range(len(flat)), key=lambda route: (flat[route], route))
    assert alignment.offsets.tolist() == [sum(e < bound for e in flat) for bound in range(num_experts + 1)]


@pytest.mark.parametrize("tokens", [0, 1, 3, 127, 128, 129])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (8, 3), (128, 8), (1023, 2), (1024, 2), (2100, 2)])
def test_routes_are_sorted_by_expert_and_stable(tokens: int, num_experts: int, k: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    check(torch.randint(0, num_experts, (tokens, k), dtype=torch.int32, generator=generator), num_experts)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30))
def test_any_routing_of_a_few_experts(routes: list[tuple[int, int]]) -> None:
    """Against the brute-force sort, with experts that get nothing."""
    check(torch.tensor(routes, dtype=torch.int32).reshape(-1, 2), 5)


@pytest.mark.parametrize("experts", [torch.zeros(3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int64)])
def test_a_wrong_shape_or_type_is_refused(experts: torch.Tensor) -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match="experts must be"):
        moe_align(experts, 4)
    with pytest.raises(ValueError, match="num_experts"):
        moe_align(torch.zeros(3, 2, dtype=torch.int32), 0)
