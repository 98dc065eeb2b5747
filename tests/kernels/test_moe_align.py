"""moe_align and blocks against brute force; the Triton kernels against them, interpreted and on a device."""

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.moe_align import align_in_blocks, blocks, max_blocks, moe_align
from tests.kernels import device_checks

ROOT = Path(__file__).parents[2]


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
    with pytest.raises(ValueError, match="experts must be"):
        align_in_blocks(experts, 4, 1)
    with pytest.raises(ValueError, match="block_rows"):
        align_in_blocks(torch.zeros(3, 2, dtype=torch.int32), 4, 0)


@pytest.mark.parametrize("block_rows", [1, 15, 16, 128])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "k"), [(0, 4, 2), (1, 1, 1), (129, 8, 3), (100, 1024, 2), (64, 1, 4)]
)
def test_blocks_cut_every_expert_s_routes(tokens: int, num_experts: int, k: int, block_rows: int) -> None:
    """Against a walk over the sorted routes; the bound holds."""
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.randint(0, num_experts, (tokens, k), dtype=torch.int32, generator=generator)
    alignment, table = align_in_blocks(experts, num_experts, block_rows)
    in_two = (*moe_align(experts, num_experts), *blocks(moe_align(experts, num_experts), block_rows)[1:-1])
    assert all(torch.equal(*pair) for pair in zip((*alignment, *table[1:-1]), in_two, strict=True))
    offsets = alignment.offsets.tolist()
    expected = [
        (expert, first, min(block_rows, offsets[expert + 1] - first))
        for expert in range(num_experts)
        for first in range(offsets[expert], offsets[expert + 1], block_rows)
    ]
    used = len(expected)
    assert list(zip(*(t.tolist()[:used] for t in (table.expert, table.first, table.rows)), strict=True)) == expected
    assert table.starts.tolist() == [sum(e < bound for e, _, _ in expected) for bound in range(num_experts + 1)]
    assert used <= table.expert.shape[0] == max_blocks(tokens * k, num_experts, block_rows)


def test_blocks_of_no_rows_are_refused() -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match="block_rows"):
        blocks(moe_align(torch.zeros(1, 1, dtype=torch.int32), 1), 0)


def test_the_bound_is_reached() -> None:
    """Against a routing made for it: every expert has one full block and one route more."""
    experts = torch.arange(4, dtype=torch.int32).repeat_interleave(5).reshape(-1, 1)
    table = blocks(moe_align(experts, 4), 4)
    assert int(table.starts[-1]) == 8 == table.expert.shape[0]


def test_the_triton_kernels_in_the_interpreter() -> None:
    """Against the reference, at 1 to 2,100 experts."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_moe_align"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("bins", [2, 1024, 4096])
def test_the_triton_kernels_compile_for_sm_90(bins: int) -> None:
    """Against the shared memory of sm_90."""
    pytest.importorskip("triton")
    from kernels.moe_align import tri
    from tests.kernels.compiled_for import SHARED_NBYTES, compile_for

    pointers = ("experts", "routes", "offsets", "counts", "places", "starts", "expert", "first", "rows")
    types = {f"{name}_ptr": "*i32" for name in pointers} | dict.fromkeys(("count", "chunks", "num_experts"), "i32")
    for kernel, arguments in (
        (tri._sort_one_chunk, {"CHUNK": tri.CHUNK, "num_warps": 8}),
        (tri._align_few, {"BLOCK_M": 16, "SIZE": tri.FEW, "num_warps": 8}),
        (tri._align_one_chunk, {"BLOCK_M": 16, "CHUNK": tri.CHUNK, "num_warps": 8}),
        (tri._count_chunk, {"CHUNK": tri.CHUNK, "num_warps": 4}),
        (tri._place_chunks, {"num_warps": 8}),
        (tri._sort_chunk, {"CHUNK": tri.CHUNK, "num_warps": 8}),
        (tri._block_table, {"BLOCK_M": 16, "num_warps": 4}),
    ):
        assert compile_for(90, kernel, types, {"BINS": bins, **arguments}).metadata.shared <= SHARED_NBYTES[90]


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", device_checks.EXPERT_COUNTS)
@pytest.mark.parametrize("tokens", [0, 1, 6, 7, 102, 103, 129, 1025, 4096])
def test_the_device_s_alignment_is_the_reference_s(num_experts: int, tokens: int) -> None:
    """Against the CPU; 64 routes are compared, 1,024 sorted by one program, 1,030 by two."""
    device_checks.alignment(num_experts, tokens, 10)


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [1, 8, 512, 1023])
@pytest.mark.parametrize("tokens", [0, 1, 3, 33, 103, 1025])
def test_sgl_kernel_gives_each_expert_the_same_routes(num_experts: int, tokens: int) -> None:
    """Against sgl_kernel where it can be imported: as sets, for its order within an expert is none; and put in order,
    as equality."""
    pytest.importorskip("sgl_kernel", exc_type=ImportError)
    from kernels.moe_align import sgl

    k = 10 if tokens % 2 else 7
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.randint(0, num_experts, (tokens, k), dtype=torch.int32, generator=generator).cuda()
    ours, theirs = moe_align(experts, num_experts), sgl.by_expert(experts, num_experts)
    offsets = ours.offsets.tolist()
    for begin, end in itertools.pairwise(offsets):
        assert set(theirs[begin:end].tolist()) == set(ours.routes[begin:end].tolist())
    ordered = moe_align(experts, num_experts, "sgl_kernel")
    assert all(torch.equal(*pair) for pair in zip(ordered, ours, strict=True))


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_sgl_kernel_s_routes_are_put_in_order(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against our alignment, from routes that are by expert and else in no order."""
    from kernels.moe_align import sgl

    experts = torch.randint(0, 9, (tokens, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(tokens))
    shuffled = torch.randperm(tokens * 3)
    routes = shuffled[experts.flatten()[shuffled].sort().indices].to(torch.int32)
    monkeypatch.setattr(sgl, "by_expert", lambda *_: routes)
    assert all(torch.equal(*pair) for pair in zip(sgl.moe_align(experts, 9), moe_align(experts, 9), strict=True))


def test_sgl_kernel_s_limits_are_refused() -> None:
    """Against the docstrings, before anything reaches a device."""
    from kernels.moe_align import sgl

    with pytest.raises(ValueError, match="at most 1023"):
        sgl.moe_align(torch.zeros(1, 1, dtype=torch.int32), 1024)
    if importlib.util.find_spec("sgl_kernel") is None:
        with pytest.raises(ValueError, match="sgl_kernel cannot be used"):
            sgl.moe_align(torch.zeros(1, 1, dtype=torch.int32), 8)
