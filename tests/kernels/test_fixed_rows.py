"""Operations with a fixed order of sums: a row has the bits that it has alone, in any number of rows and at any place.

On the CPU; as equality of bits, for n around a tile's edges, with one thread and with two, in memory that starts on a
64-byte boundary and in memory that does not. What computes rows one by one in any case is tried too.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels import pointwise
from kernels.formats import layout
from kernels.grouped_gemm import fixed_rows, grouped_gemm
from kernels.linear import heads_linear, linear, ref, rows_at_once
from kernels.moe_align import moe_align
from kernels.norm import gated_rms_norm, rms_norm
from kernels.rope import norm_rope
from kernels.sampling import logprobs
from kernels.topk_route import grouped_route, topk_route, topk_softmax
from tests.kernels.expert_records import KINDS, Experts

COUNTS = (1, 2, ref.ROWS - 1, ref.ROWS, ref.ROWS + 1, 2 * ref.ROWS + 1, 63)
Rows = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""Of x [n, W] to tensors [n, ...]."""


def expect_rows_alike(x: torch.Tensor, rows: Rows) -> None:
    """Each row of `rows(x)` is that of the row alone with as many threads, whatever n and the boundary."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            alone = [torch.cat(parts) for parts in zip(*(rows(row[None].clone()) for row in x), strict=True)]
            for count in COUNTS:
                for off, first in ((0, 0), (1, min(3, len(x) - count))):
                    memory = torch.empty(count * x.shape[1] + off, dtype=x.dtype)[off:]
                    here = memory.view(count, -1).copy_(x[first : first + count])
                    for ours, expected in zip(rows(here), alone, strict=True):
                        assert torch.equal(ours, expected[first : first + count]), (threads, count, off)
    finally:
        torch.set_num_threads(before)


def random(count: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(seed + width)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "out"), [(1, 1), (20, 61), (36, 130), (64, 128), (300, 8), (1000, 37)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_of_a_product(dtype: torch.dtype, width: int, out: int, with_bias: bool) -> None:
    weight, bias = random(out, width, dtype, 1) / width**0.5, random(1, out, dtype, 2)[0] if with_bias else None
    rows = rows_at_once(weight, bias)
    expect_rows_alike(random(max(COUNTS), width, dtype), lambda x: (linear(x, weight, bias, rows),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width", "out"), [(1, 8, 3), (4, 24, 16), (3, 64, 40)])
def test_a_row_of_a_product_by_heads(dtype: torch.dtype, heads: int, width: int, out: int) -> None:
    weight = (random(heads * width, out, dtype, 1) / width**0.5).view(heads, width, out)
    rows = rows_at_once(weight)
    x = random(max(COUNTS), heads * width, dtype)
    expect_rows_alike(x, lambda x: (heads_linear(x.view(-1, heads, width), weight, rows),))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 70), st.integers(1, 70), st.sampled_from([1, 5, ref.ROWS]))
def test_products_are_those_of_float64(count: int, width: int, out: int, rows: int) -> None:
    """However many rows are multiplied at a time; those of heads too."""
    x, weight, bias = random(count, width), random(out, width, seed=1), random(1, out, seed=2)[0]
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear(x, weight, bias, rows).double(), expected, atol=1e-3, rtol=1e-5)
    by_head = heads_linear(x[:, None], weight.T[None].contiguous(), rows)[:, 0]
    torch.testing.assert_close(by_head.double(), expected - bias.double(), atol=1e-3, rtol=1e-5)


def test_products_that_look_at_a_row_s_place_are_taken_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against libraries whose sums differ by place."""
    weight = random(5, 8)
    assert rows_at_once(weight) == ref.ROWS

    def by_place(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x @ weight.T + torch.arange(len(x))[:, None] * 1e-5

    monkeypatch.setattr(functional, "linear", by_place)
    assert rows_at_once(weight) == 1


def test_shapes_and_types_that_do_not_fit() -> None:
    """By name."""
    x, weight = random(2, 8), random(5, 8)
    for wrong in (random(2, 7), random(2, 8, torch.bfloat16), x[0]):
        with pytest.raises(ValueError, match="does not fit the weight"):
            linear(wrong, weight, None, 16)
        with pytest.raises(ValueError, match="does not fit the weight"):
            heads_linear(wrong, weight[None], 16)
    with pytest.raises(ValueError, match="bias"):
        linear(x, weight, random(1, 4)[0], 16)


@pytest.mark.parametrize("width", [1, 3, 20, 36, 61, 128, 333, 1000])
def test_rows_of_what_computes_number_by_number(width: int) -> None:
    """Sigmoid and SiLU; what they are is checked against torch's in float64."""
    x = random(max(COUNTS), width)
    x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, 0.0
    expect_rows_alike(x, lambda x: (pointwise.sigmoid(x), pointwise.silu(x)))
    torch.testing.assert_close(pointwise.sigmoid(x).double(), torch.sigmoid(x.double()), atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(pointwise.silu(x).double(), functional.silu(x.double()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_norms_and_rotations(dtype: torch.dtype) -> None:
    """Of three heads of 20, as the views that layers make; by weights and gates of every kind."""
    weight = random(1, 20, dtype, 5)[0]

    def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = x.view(-1, 6, 20)
        cos, sin = (torch.cos(x[:, :8].float()), torch.sin(x[:, :8].float()))
        turned = norm_rope(heads[:, :3], heads[:, 3:5], weight, weight, 1e-6, cos, sin)
        gated = gated_rms_norm(heads[:, :3], heads[:, 3:], weight, 1e-6, fixed=True)
        return rms_norm(x, torch.ones(120, dtype=dtype), 1e-6), rms_norm(heads, weight, 1e-6, True), gated, *turned

    expect_rows_alike(random(max(COUNTS), 120, dtype), rows)


@pytest.mark.parametrize("experts", [8, 61, 128, 512])
def test_rows_of_routers_and_log_probabilities(experts: int) -> None:
    """All ways to route, and log-probabilities of a vocabulary as large."""
    bias, k = random(1, experts, seed=9)[0] / 10, min(8, experts // 2)

    def rows(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups = (4, 2) if experts % 4 == 0 else (1, 1)
        scored = grouped_route(logits, bias, min(k, experts // 2), *groups, True, 2.5, fixed=True)
        told = logprobs(logits, torch.zeros(len(logits), dtype=torch.int64), 5, fixed=True)
        return *topk_route(logits, k, True), *topk_softmax(logits, k), *scored, *told

    expect_rows_alike(random(max(COUNTS), experts), rows)


@pytest.mark.parametrize("vocab", [1, 4095, 4096, 4097, 40_000])
def test_log_probabilities_are_those_of_float64(vocab: int) -> None:
    """Against torch's own log-softmax; with one thread and with two to the bit, of a vocabulary of many parts too."""
    logits = random(3, vocab)
    expected = torch.log_softmax(logits.double(), dim=1)
    computed = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        computed.append(logprobs(logits, torch.tensor([0, vocab - 1, 0]), 3, fixed=True))
    torch.set_num_threads(before)
    for one, other in zip(*computed, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(computed[0].drawn, expected[[0, 1, 2], [0, vocab - 1, 0]], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", *KINDS])
def test_rows_of_experts(kind: str) -> None:
    """A token's rows alone, and beside others that go to its experts or to others; quantised ones in both types."""
    generator = torch.Generator().manual_seed(3)
    experts = Experts(kind, 64, 32, 4, generator)
    pool = experts.pool(4, {expert: 3 - expert for expert in range(4)})
    chosen = torch.rand(max(COUNTS), 4, generator=generator).topk(2, dim=1).indices.to(torch.int32)
    weights = torch.rand(max(COUNTS), 2, generator=generator)
    for dtype in [torch.bfloat16, torch.float32] if kind in KINDS else [getattr(torch, kind)]:
        x = random(max(COUNTS), 64, dtype)
        scales, fixed = experts.input_scales(x), fixed_rows(experts.layout, dtype)

        def rows(
            both: torch.Tensor, dtype: torch.dtype = dtype, scales: object = scales, fixed: int = fixed
        ) -> tuple[torch.Tensor]:
            """Of x with the token's number behind it."""
            number = both[:, 64].long()
            out = both.new_empty(2 * len(both), 64)
            alignment = moe_align(chosen[number], 4)
            kept = (pool, experts.layout, [0, 1, 2, 3], [3, 2, 1, 0])
            grouped_gemm(both[:, :64], weights[number], alignment, *kept, out, scales, fixed)  # type: ignore[arg-type]
            return (out.view(len(both), -1),)

        expect_rows_alike(torch.cat([x, torch.arange(max(COUNTS), dtype=dtype)[:, None]], dim=1), rows)


def test_the_fastest_operations_look_at_more_than_their_row() -> None:
    """What is tried above can fail: it does for torch's own product or SiLU (for which, depends on the processor)."""
    weight, alike = random(61, 300), 0
    for plain in (partial(functional.linear, weight=weight), functional.silu):
        with suppress(AssertionError):
            expect_rows_alike(random(max(COUNTS), 300), lambda x, plain=plain: (plain(x),))  # type: ignore[misc]
            alike += 1
    assert alike < 2


def test_matrices_of_experts_are_tried_in_their_shapes() -> None:
    """Of both."""
    assert fixed_rows(layout("float32", 36, 20), torch.float32) in (1, ref.ROWS)
