"""grouped_gemm and combine against float64, and against themselves as equality of bits."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.formats import ExpertFormat, RecordLayout, layout
from kernels.grouped_gemm import (
    InputScales,
    arrange,
    block_rows,
    combine,
    cost,
    grouped_gemm,
    grouped_gemm_slots,
)
from kernels.grouped_gemm.ref import _filled_up
from kernels.moe_align import Alignment, blocks, moe_align
from kernels.quant import quantised_inputs
from kernels.topk_route import topk_route
from tests.kernels import device_checks
from tests.kernels.expert_records import KINDS, Experts

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

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


def test_rows_are_filled_up_to_the_next_number_of_three_significant_bits() -> None:
    """Against all such numbers, in order; what is added repeats the last row."""
    allowed = sorted({lead << shift for lead in range(8) for shift in range(10)} - {0})
    for count in range(1, 2000):
        filled = _filled_up(torch.arange(5, 5 + count)).tolist()
        assert filled[:count] == list(range(5, 5 + count))
        assert len(filled) == next(number for number in allowed if number >= count) <= max(count, 5 * count // 4)
        assert set(filled[count:]) <= {filled[count - 1]}


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
        ({"input_scales": InputScales(1.0, 1.0)}, "for quantised inputs alone"),
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


@pytest.mark.parametrize(("tokens", "dtype"), [(0, torch.float32), (5, torch.float32), (33, torch.bfloat16)])
@pytest.mark.parametrize("kind", [*KINDS, "gpt-oss unquantised"])
def test_rows_of_every_kind_are_those_of_float64(kind: str, tokens: int, dtype: torch.dtype) -> None:
    """Against the exact values of the records, in the whole and in spans, whatever slots they are in."""
    generator = torch.Generator().manual_seed(tokens)
    unquantised = ExpertFormat(str(dtype).removeprefix("torch."), bias=True, swiglu_limit=0.9)
    experts = Experts(KINDS.get(kind, unquantised), 64, 96, 5, generator)
    x = torch.randn(tokens, 64, generator=generator).to(dtype)
    scales = experts.input_scales(x)
    weights, chosen = topk_route(torch.randn(tokens, 5, generator=generator), 2, True)
    alignment = moe_align(chosen, 5)
    rows = torch.full((tokens * 2, 64), float("nan"), dtype=dtype)
    routed = sorted(set(chosen.flatten().tolist()))
    pool = experts.pool(7, {e: e for e in range(5)})
    grouped_gemm(x, weights, alignment, pool, experts.layout, routed, routed, rows, scales)
    expected = experts.float64(x, weights, chosen)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    if scales is not None and dtype == torch.bfloat16:  # which moves some of down's inputs to another code
        tolerance = 5e-2
    assert (rows.double() - expected).norm() <= tolerance * expected.norm()

    table = blocks(alignment, block_rows(tokens, 2, 5, experts.layout, CPU))
    slot_of = torch.tensor([6, 2, 0, 4, 1], dtype=torch.int32)
    pool = experts.pool(7, dict(enumerate(slot_of.tolist())))
    for cuts in ([0, 5], [0, 0, 2, 3, 5]):
        again = torch.full_like(rows, float("nan"))
        for begin, end in itertools.pairwise(cuts):
            span = torch.tensor([begin, end], dtype=torch.int32)
            grouped_gemm_slots(
                x,
                weights,
                table,
                pool,
                experts.layout,
                slot_of,
                span,
                end - begin,
                again,
                input_scales=scales,
            )
        assert torch.equal(again, rows)


def test_experts_without_a_slot_are_left_out() -> None:
    """Against the run in which all have one: its rows, and the marks of before for the absent expert's."""
    generator = torch.Generator().manual_seed(0)
    experts = Experts("float32", 16, 8, 6, generator)
    x = torch.randn(9, 16, generator=generator)
    weights, chosen = topk_route(torch.randn(9, 6, generator=generator), 2, True)
    table = blocks(moe_align(chosen, 6), block_rows(9, 2, 6, experts.layout, CPU))
    pool, span = experts.pool(6, {e: e for e in range(6)}), torch.tensor([0, 6], dtype=torch.int32)

    def run(slot_of: torch.Tensor, **how: object) -> torch.Tensor:
        rows = torch.full((18, 16), 7.0)
        grouped_gemm_slots(x, weights, table, pool, experts.layout, slot_of, span, 6, rows, **how)  # type: ignore[arg-type]
        return rows

    slot_of = torch.arange(6, dtype=torch.int32)
    plain = run(slot_of)
    absent = chosen.flatten() == chosen[0, 0]
    slot_of[chosen[0, 0]] = -1
    assert torch.equal(run(slot_of), torch.where(absent[:, None], 7.0, plain))
    again = run(slot_of, arranged=True, mid=torch.empty(18, 8))
    assert torch.equal(again, run(slot_of)) and arrange(x, experts.layout) is x


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"slot_of": torch.zeros(3, dtype=torch.int32)}, "slot_of must"),
        ({"span": torch.zeros(2, dtype=torch.int64)}, "span must"),
        ({"blocks": blocks(moe_align(torch.zeros(3, 2, dtype=torch.int32), 4), 8)}, "16 rows, not 8"),
        ({"max_routed": 5}, r"0\.\.4, not 5"),
        ({"x": torch.zeros(3, 16, dtype=torch.float16)}, "x must"),
        ({"mid": torch.zeros(6, 16)}, "mid must"),
        ({"layout": layout(KINDS["w4a4"], 16, 16)}, "input_scales must be the layer's two"),
        ({"layout": layout(KINDS["w4a4"], 16, 16), "input_scales": InputScales(0.0, 1.0)}, "above 0"),
    ],
)
def test_arguments_of_slots_that_do_not_fit_are_refused(change: dict[str, object], match: str) -> None:
    """Against the docstring."""
    record = layout("nvfp4", 16, 16)
    arguments: dict[str, object] = {
        "x": torch.zeros(3, 16, dtype=torch.bfloat16),
        "weights": torch.zeros(3, 2),
        "blocks": blocks(moe_align(torch.zeros(3, 2, dtype=torch.int32), 4), 16),
        "pool": torch.zeros(4, record.record_nbytes, dtype=torch.uint8),
        "layout": record,
        "slot_of": torch.zeros(4, dtype=torch.int32),
        "span": torch.tensor([0, 4], dtype=torch.int32),
        "max_routed": 4,
        "out_rows": torch.zeros(6, 16, dtype=torch.bfloat16),
    }
    with pytest.raises(ValueError, match=match):
        grouped_gemm_slots(**(arguments | change))  # type: ignore[arg-type]


def test_the_triton_kernels_in_the_interpreter() -> None:
    """Against float64 and the reference, and against themselves in other slots and spans."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_grouped_gemm"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize(
    ("format_name", "tokens"), [("nvfp4", 17), ("nvfp4", 1024), ("nvfp4", 4096), ("bfloat16", 128)]
)
def test_the_triton_kernels_compile_for_sm_90(format_name: str, tokens: int) -> None:
    """Against the shared memory of sm_90, and warpgroup matrix instructions fed from registers; nothing spills."""
    pytest.importorskip("triton")
    from kernels.grouped_gemm import tri
    from tests.kernels.compiled_for import SHARED_NBYTES, compile_for

    record, types = layout(format_name, 2560, 640), kernel_types()
    tiles = cost.tiles(tokens, 10, 512, record.kind, SHARED_NBYTES[90])
    for kernel, arguments in (
        (tri._gate_up, tri.gate_up_arguments(record, 10, tiles.gate_up)),
        (tri._down, tri.down_arguments(record, tiles.down)),
    ):
        compiled = compile_for(90, kernel, types, arguments)
        assert compiled.metadata.shared <= SHARED_NBYTES[90]
        assert "wgmma.mma_async" in compiled.asm["ptx"]
    types["rows_ptr"] = "*bf16"
    compile_for(90, tri._combine, types, {"H": 2560, "K": 10, "num_warps": 4})


def kernel_types() -> dict[str, str]:
    tables = ("slot_of", "span", "routes", "starts", "expert", "first", "rows")
    types = {f"{name}_ptr": "*i32" for name in tables} | {"pool_ptr": "*u8", "weights_ptr": "*fp32"}
    types |= dict.fromkeys(("in_scale", "down_scale"), "fp32")
    return types | dict.fromkeys(("x_ptr", "mid_ptr", "out_ptr"), "*bf16")


@pytest.mark.parametrize("geometry", [(2560, 640), (2048, 768), (96, 48)])
@pytest.mark.parametrize("format_name", ["nvfp4", "bfloat16"])
def test_the_kernels_of_few_tokens_compile_for_sm_90(format_name: str, geometry: tuple[int, int]) -> None:
    """One barrier, of the sum at the end: every thread loads what it needs, and 16 bytes of W at a time."""
    pytest.importorskip("triton")
    from kernels.grouped_gemm import tri_few
    from tests.kernels.compiled_for import SHARED_NBYTES, compile_for

    record = layout(format_name, *geometry)
    tiles = cost.tiles(1, 10, 512, record.kind, SHARED_NBYTES[90])
    for kernel, arguments in (
        (tri_few._gate_up, {"K": 10, "LIMIT": 0.0, **tri_few.arguments(record, "gate_up", tiles.gate_up)}),
        (tri_few._down, tri_few.arguments(record, "down", tiles.down)),
    ):
        types = {name: kind for name, kind in kernel_types().items() if name in kernel.arg_names}
        text = compile_for(90, kernel, types, arguments).asm["ptx"]
        assert text.count("bar.sync") <= 1 and ".ftz" not in text
        assert "ld.global.v4.b32" in text or geometry == (96, 48)  # whose rows start in the middle of 16 bytes


@pytest.mark.parametrize(
    ("kind", "capability"),
    [("gpt-oss", 90), ("w4a4", 90), ("w4a4", 80), ("fp8_block", 90), ("blocks of 128", 80), ("fp8_tensor", 90)],
)
def test_the_kernels_of_every_kind_compile(kind: str, capability: int) -> None:
    """Against the shared memory, and without a spilled register in tiles of up to 32 rows; on sm_80 without its type
    for E4M3, which it lacks, and on sm_90 with warpgroup matrix instructions."""
    pytest.importorskip("triton")
    for tokens in (1, 1024):
        for text in expect_tiles_fit(capability, COMPILED[kind], (1024, 736), tokens):
            assert ".ftz" not in text and ("e4m3" not in text or capability >= 89)
            assert ("wgmma" in text) == (capability == 90 and tokens > 1)


COMPILED = {
    **KINDS,
    "blocks of 128": ExpertFormat("fp8_block", block=(128, 128)),
    "bfloat16": ExpertFormat("bfloat16"),
    "float32": ExpertFormat("float32"),
}
EACH_BLOCK_M = {1: 1, 16: 100, 32: 1000, 64: 2000, 128: 5000}
"""Tokens of 10 routes to 512 experts that are cut into blocks of as many rows."""


def expect_tiles_fit(
    capability: int, kind: ExpertFormat, geometry: tuple[int, int], tokens: int, **most: int
) -> list[str]:
    """The PTX of both kernels for T = `tokens` of 10 routes to 512 experts, which fit the GPU."""
    from kernels.grouped_gemm import tri, tri_few
    from tests.kernels.compiled_for import SHARED_NBYTES, expect_fits

    record, new = layout(kind, *geometry), capability >= 89
    tiles = cost.tiles(tokens, 10, 512, kind, SHARED_NBYTES[capability])
    if tiles.gate_up.block_m == 1:
        limit = {"K": 10, "LIMIT": kind.swiglu_limit or 0.0}
        kernels = (
            (tri_few._gate_up, limit | tri_few.arguments(record, "gate_up", tiles.gate_up, new)),
            (tri_few._down, tri_few.arguments(record, "down", tiles.down, new)),
        )
    else:
        kernels = (
            (tri._gate_up, tri.gate_up_arguments(record, 10, tiles.gate_up, new)),
            (tri._down, tri.down_arguments(record, tiles.down, new)),
        )
    texts = []
    for kernel, arguments in kernels:
        types = {name: type_ for name, type_ in kernel_types().items() if name in kernel.arg_names}
        if kind.name == "float32":
            types = {name: "*fp32" if type_ == "*bf16" else type_ for name, type_ in types.items()}
        texts.append(expect_fits(kernel, types, arguments, capability, **most).asm["ptx"])
    return texts


@pytest.mark.parametrize("kind", ["gpt-oss", "fp8_block"])
def test_the_largest_tiles_fit_99_kib_of_shared_memory(kind: str) -> None:
    """Against that of sm_86, and the registers of a thread."""
    pytest.importorskip("triton")
    expect_tiles_fit(86, COMPILED[kind], (2880, 2880), EACH_BLOCK_M[128])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", [80, 86, 89, 120])
@pytest.mark.parametrize("kind", COMPILED)
def test_every_tile_fits_gpus_without_warpgroup_instructions(kind: str, capability: int) -> None:
    """Against shared memory and registers, in sizes that are and that are no multiples of what a step takes."""
    pytest.importorskip("triton")
    for geometry, tokens in itertools.product(((2560, 640), (2880, 2880), (1024, 736)), EACH_BLOCK_M.values()):
        expect_tiles_fit(capability, COMPILED[kind], geometry, tokens)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", COMPILED)
def test_every_tile_fits_the_shared_memory_of_sm_90(kind: str) -> None:
    """Against 227 KiB; some of the largest tiles, which were the fastest of a sweep, keep registers on the stack."""
    pytest.importorskip("triton")
    for geometry, tokens in itertools.product(((2560, 640), (2880, 2880)), EACH_BLOCK_M.values()):
        expect_tiles_fit(90, COMPILED[kind], geometry, tokens, stack_nbytes=1 << 20)


def test_the_rounding_of_inputs_compiles() -> None:
    """With the divisions that round to nearest, and none of the shortened ones, on which codes would depend."""
    pytest.importorskip("triton")
    from kernels.grouped_gemm import tri_inputs
    from tests.kernels.compiled_for import expect_fits

    types = {"x_ptr": "*bf16", "out_ptr": "*bf16", "input_scale": "fp32"}
    text = expect_fits(tri_inputs._quantise, types, {"H": 2560, "num_warps": 4}).asm["ptx"]
    assert "div.rn.f32" in text and not any(short in text for short in ("div.full", "div.approx", "rcp.", "fma."))


def test_the_text_that_decodes_a_word_gives_its_eight_values() -> None:
    """Against the E2M1 table, by carrying out the text's instructions on all bytes in all places."""
    pytest.importorskip("triton")
    from kernels.grouped_gemm import tri_few

    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([magnitudes, -magnitudes])
    words = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    values = carry_out(tri_few._DECODE.value, {"$8": words})
    for i in range(8):
        np.testing.assert_array_equal(values[f"${i}"] * np.float32(2**14), table[(words >> np.uint32(4 * i)) & 15])


def test_the_text_that_decodes_e4m3_gives_its_numbers() -> None:
    """Against torch's float8_e4m3fn, by carrying out the text's instructions on all codes in all four places."""
    pytest.importorskip("triton")
    from kernels.grouped_gemm import tri_decode

    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    for place in range(4):
        words = codes.astype(np.uint32) << np.uint32(8 * place)
        values = carry_out(tri_decode._E4M3.value, {"$2": words})[f"${place // 2}"]
        halves = values.view(np.uint16).reshape(-1, 2)[:, place % 2].astype(np.uint32) << 16  # bfloat16 as float32
        np.testing.assert_array_equal(halves.view(np.float32) * np.float32(2.0**120), expected)


def carry_out(text: str, registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Registers after a text of PTX that moves bits and converts float16, on vectors."""
    registers = dict(registers)

    def get(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.uint32(int(name, 16 if "x" in name else 10))  # type: ignore[return-value]

    for line in text.replace("\n", " ").strip().strip("{}").split(";"):
        operation, _, rest = line.strip().partition(" ")
        operands = [operand.strip("{} ") for operand in rest.split(",")]
        match operation.split("."):
            case ["shl", _]:
                registers[operands[0]] = get(operands[1]) << get(operands[2])
            case ["shr", _]:
                registers[operands[0]] = get(operands[1]) >> get(operands[2])
            case ["and", _]:
                registers[operands[0]] = get(operands[1]) & get(operands[2])
            case ["lop3", _]:
                assert operands[4] == "0xEA"
                registers[operands[0]] = (get(operands[1]) & get(operands[2])) | get(operands[3])
            case ["or", _]:
                registers[operands[0]] = get(operands[1]) | get(operands[2])
            case ["prmt", _]:
                assert operands[2] == "0"
                source, selected = get(operands[1]).view(np.uint8).reshape(-1, 4), int(operands[3], 16)
                picked = [selected >> 4 * i & 0xF for i in range(4)]
                columns = [source[:, at] if at < 4 else np.zeros_like(source[:, 0]) for at in picked]
                registers[operands[0]] = np.stack(columns, axis=1).reshape(-1).view(np.uint32)
            case ["mov", _]:
                halves = get(operands[2]).view(np.uint16).reshape(-1, 2)
                registers[operands[0]], registers[operands[1]] = halves[:, 0], halves[:, 1]
            case ["cvt", "f32", "f16"]:
                registers[operands[0]] = get(operands[1]).copy().view(np.float16).astype(np.float32)
            case _:
                assert operation in ("", ".reg"), line
    return registers


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
@pytest.mark.parametrize("kind", COMPILED)
def test_tiles_take_whole_blocks_of_the_format(kind: str, shared_kib: int) -> None:
    """Against what the kernels need: powers of two, one block_m for both, 1 row or at least 16, whole scale words."""
    gpu = (COMPILED[kind], shared_kib * 1024)
    for tokens in (0, 1, 16, 17, 100, 1000, 5000, 100_000):
        gate_up, down = cost.tiles(tokens, 10, 512, *gpu)
        assert gate_up.block_m == down.block_m and (gate_up.block_m == 1) == (tokens <= cost.FEW_TOKENS)
        assert gate_up.block_m == 1 or gate_up.block_m >= 16
        for tile in (gate_up, down):
            assert all(size & (size - 1) == 0 for size in tile[:3]) and tile.block_k >= 32
    assert cost.tiles(2, 2, 3, *gpu).gate_up.block_m == 16  # more routes than experts share their reading


@pytest.mark.gpu
@pytest.mark.parametrize("format_name", ["nvfp4", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"),
    [(1, 512, 160), (4, 80, 48), (16, 512, 160), (37, 96, 48), (300, 512, 320), (2000, 80, 48)],
)
def test_the_device_s_rows_are_those_of_float64(format_name: str, tokens: int, hidden: int, intermediate: int) -> None:
    """Against the exact values of the records."""
    device_checks.values(format_name, tokens, hidden, intermediate, 16, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nvfp4"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"), [(1, 512, 160), (16, 96, 192), (37, 96, 64), (300, 512, 320), (900, 96, 64)]
)
def test_the_device_s_rows_of_every_kind_are_those_of_float64(
    kind: str, tokens: int, hidden: int, intermediate: int
) -> None:
    """Against the exact values of the records; of FP8 with sizes that are multiples of nothing."""
    if kind.startswith("fp8"):
        hidden, intermediate = hidden + 13, intermediate + 7
    device_checks.values(kind, tokens, hidden, intermediate, 16, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "tokens"), [((128, 128), 7), ((128, 128), 300), ((1, 4096), 300), ((64, 64), 2000)])
def test_the_device_s_rows_of_fp8_blocks_are_those_of_float64(block: tuple[int, int], tokens: int) -> None:
    """Scales that apply to whole steps, or to whole rows."""
    device_checks.values(ExpertFormat("fp8_block", block), tokens, 392, 200, 16, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_device_s_quantised_inputs_are_the_reference_s(dtype: torch.dtype) -> None:
    """Against the CPU, as equality of bits."""
    from kernels.grouped_gemm import tri_inputs

    x = (torch.randn(64, 2576, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    x[0, :16], x[1, 5] = 0, 1e6
    for input_scale in (0.0123, 2.0**-9):
        assert torch.equal(tri_inputs.quantised(x.cuda(), input_scale).cpu(), quantised_inputs(x, input_scale))


@pytest.mark.gpu
@pytest.mark.parametrize("format_name", [*KINDS, "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "k"), [(1, 64, 10), (6, 64, 10), (7, 64, 10), (16, 64, 10), (600, 8, 2), (1024, 64, 10)]
)
def test_the_device_s_rows_are_the_same_bits(format_name: str, tokens: int, num_experts: int, k: int) -> None:
    """Against the run in one launch: in queries, in other slots of a larger pool, not-a-number in the free ones."""
    device_checks.bits(format_name, tokens, num_experts, k, 512, 160)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 129])
def test_the_device_s_sum_is_the_reference_s(tokens: int) -> None:
    """Against the CPU, as equality of bits."""
    device_checks.sums(tokens, 10, 2560)
