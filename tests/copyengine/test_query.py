"""Query and stream groups against figures by hand."""

import pytest

from copyengine.query import query_experts, stream_groups


@pytest.mark.parametrize(
    ("experts", "query", "groups"),
    [(0, 0, 0), (1, 1, 2), (8, 8, 2), (32, 32, 2), (33, 32, 4), (127, 32, 8), (128, 32, 8), (129, 32, 10)],
)
def test_groups_hold_two_layers(experts: int, query: int, groups: int) -> None:
    """Groups of min(E, 32), as many as two layers take."""
    assert (query_experts(experts), stream_groups(experts)) == (query, groups)


@pytest.mark.parametrize("experts", [256, 257, 512, 4096])
def test_groups_are_bounded(experts: int) -> None:
    """Four queries of the largest size, 512 experts, in the groups that are cut."""
    assert query_experts(experts) * stream_groups(experts) == 512


@pytest.mark.parametrize(
    ("experts", "query", "groups"),
    [(0, 0, 0), (1, 1, 2), (64, 64, 2), (65, 64, 4), (128, 64, 4), (256, 64, 8), (257, 64, 8), (512, 64, 8)],
)
def test_groups_on_a_gpu(experts: int, query: int, groups: int) -> None:
    """Groups of min(E, 64), as many as two layers take, 8 at most."""
    assert (query_experts(experts, "cuda"), stream_groups(experts, "cuda")) == (query, groups)
