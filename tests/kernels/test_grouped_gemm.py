"""grouped_gemm and combine against float64, and against themselves as equality of bits."""

import pytest
import torch

from kernels.formats import RecordLayout, layout
from kernels.grouped_gemm import combine, grouped_gemm
from kernels.moe_align import Alignment, moe_align
from kernels.topk_route import topk_route

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


class Case:
    """A routed batch, its experts, and a pool that holds expert e in slot `slot_of[e]`."""

    def __init__(self, tokens: int, hidden: int, intermediate: int, num_experts: int, k: int, dtype: str) -> None:
        generator = torch.Generator().manual_seed(tokens * 1000 + num_experts)
        self.layout = layout(dtype, hidden, intermediate)
        self.x = torch.randn(tokens, hidden, generator=generator).to(DTYPES[dtype])
        self.gate_up = torch.randn(num_experts, 2 * intermediate, hidden, generator=generator).to(DTYPES[dtype]) * 0.2
        self.down = torch.randn(num_experts, hidden, intermediate, generator=generator).to(DTYPES[dtype]) * 0.2
        logits = torch.randn(tokens, num_experts, generator=generator)
        self.weights, self.experts = topk_route(logits, k, True)
        self.alignment = moe_align(self.experts, num_experts)
        self.routed = sorted(set(self.experts.flatten().tolist()))

    def pool(self, slots: int, slot_of: dict[int, int]) -> torch.Tensor:
        """[slots, record_nbytes] uint8 on a 128-byte boundary, 0xFF (not a number) wherever nothing belongs."""
        record: RecordLayout = self.layout
        raw = torch.full((slots * record.record_nbytes + 128,), 0xFF, dtype=torch.uint8)
        first = -raw.data_ptr() % 128
        pool = raw[first : first + slots * record.record_nbytes].view(slots, record.record_nbytes)
        for expert, slot in slot_of.items():
            for name, tensor in (("gate_up", self.gate_up), ("down", self.down)):
                field = record.field(name)
                codes = tensor[expert].contiguous().view(torch.uint8).flatten()
                pool[slot, field.offset : field.offset + field.nbytes] = codes
        return pool

    def run(self, slots: int, slot_of: dict[int, int], group: int) -> torch.Tensor:
        """Rows [T * K, H] over the routed experts in groups of `group`."""
        rows = torch.full((self.experts.numel(), self.layout.hidden), float("nan"), dtype=self.x.dtype)
        pool = self.pool(slots, slot_of)
        for first in range(0, len(self.routed), group):
            part = self.routed[first : first + group]
            places = [slot_of[expert] for expert in part]
            grouped_gemm(self.x, self.weights, self.alignment, pool, self.layout, part, places, rows)
        return rows

    def float64(self) -> torch.Tensor:
        """[T, K, H] row by row, nothing shared with the kernel."""
        out = torch.zeros(*self.experts.shape, self.layout.hidden, dtype=torch.float64)
        for t, chosen in enumerate(self.experts.tolist()):
            for k, expert in enumerate(chosen):
                gate, up = (self.gate_up[expert].double() @ self.x[t].double()).chunk(2)
                hidden = gate / (1 + torch.exp(-gate)) * up
                out[t, k] = self.weights[t, k].double() * (self.down[expert].double() @ hidden)
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "num_experts", "k"),
    [
        (0, 16, 8, 4, 2),
        (1, 16, 8, 4, 2),
        (3, 33, 7, 8, 1),
        (127, 64, 32, 8, 8),
        (128, 48, 24, 130, 3),
        (129, 1, 1, 2, 2),
    ],
)
def test_every_row_and_every_sum_is_that_of_float64(
    dtype: str, tokens: int, hidden: int, intermediate: int, num_experts: int, k: int
) -> None:
    case = Case(tokens, hidden, intermediate, num_experts, k, dtype)
    rows = case.run(num_experts, {expert: expert for expert in range(num_experts)}, group=128)
    expected = case.float64()
    scale = expected.abs().max() if expected.numel() else torch.tensor(1.0)
    assert not torch.isnan(rows).any()
    error = (rows.view(tokens, k, hidden).double() - expected).abs()
    assert (error <= TOLERANCE[dtype] * scale).all()
    total = combine(rows, tokens)
    assert total.shape == (tokens, hidden) and total.dtype == case.x.dtype
    assert ((total.double() - expected.sum(1)).abs() <= 2 * TOLERANCE[dtype] * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 96, 97, 200])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (100, 36), (33, 7), (256, 128)])
def test_rows_are_the_same_bits_whatever_slot_pool_and_group(
    dtype: str, tokens: int, hidden: int, intermediate: int
) -> None:
    """Against the run with every expert in the slot of its number and one group."""
    case = Case(tokens, hidden, intermediate, 16, 4, dtype)
    plain = case.run(16, {expert: expert for expert in range(16)}, group=128)
    shuffled = torch.randperm(61, generator=torch.Generator().manual_seed(3)).tolist()
    for slots, slot_of, group in (
        (16, {expert: 15 - expert for expert in range(16)}, 1),
        (61, {expert: shuffled[expert] for expert in range(16)}, 3),
        (17, {expert: expert + 1 for expert in range(16)}, 128),
    ):
        assert torch.equal(case.run(slots, slot_of, group), plain)


def test_rows_of_experts_outside_the_group_are_left_alone() -> None:
    """Against the marks they held before."""
    case = Case(20, 16, 8, 8, 2, "float32")
    expert = case.routed[0]
    rows = torch.full((40, 16), 7.0)
    pool = case.pool(1, {expert: 0})
    grouped_gemm(case.x, case.weights, case.alignment, pool, case.layout, [expert], [0], rows)
    mine = (case.experts.flatten() == expert).nonzero().flatten()
    others = (case.experts.flatten() != expert).nonzero().flatten()
    assert (rows[others] == 7.0).all() and not (rows[mine] == 7.0).any()


def test_combine_adds_in_the_order_of_k() -> None:
    """Against float32 sums written out: 1e8 + 1 - 1e8 is 0 in this order and 1 in another."""
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0], [-1e8], [1e8]])
    assert combine(rows, 2).tolist() == [[0.0], [0.0]]
    assert combine(rows[[0, 2, 1]], 1).tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.zeros(3, 16, dtype=torch.bfloat16)}, "x must"),
        ({"weights": torch.zeros(3, 2, dtype=torch.float64)}, "weights must"),
        ({"pool": torch.zeros(2, 128, dtype=torch.uint8)}, "pool must"),
        ({"out_rows": torch.zeros(5, 16)}, "out_rows must"),
        ({"alignment": Alignment(torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32))}, "routes must"),
        ({"slots": [0]}, "but 1 slots"),
        ({"slots": [0, 4]}, "slots must"),
        ({"experts": [0, 4]}, "experts must"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, object], match: str) -> None:
    """Against the docstring."""
    record = layout("float32", 16, 8)
    arguments: dict[str, object] = {
        "x": torch.zeros(3, 16),
        "weights": torch.zeros(3, 2),
        "alignment": moe_align(torch.zeros(3, 2, dtype=torch.int32), 4),
        "pool": torch.zeros(4, record.record_nbytes, dtype=torch.uint8),
        "layout": record,
        "experts": [0, 1],
        "slots": [0, 1],
        "out_rows": torch.zeros(6, 16),
    }
    with pytest.raises(ValueError, match=match):
        grouped_gemm(**(arguments | change))  # type: ignore[arg-type]
