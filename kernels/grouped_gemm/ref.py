"""Plain torch: one matmul per expert and projection; quantised weights are first brought to the type of x.

Bit-identity on the CPU: MKL's float32 results change with the number of rows and with the alignment of the operands
(measured on an AMD EPYC with AVX-512, torch 2.13, 2026-11: float32 products of 1-7 rows differ between operands that
start on a 64-byte boundary and those that do not; bfloat16 and float16 ones did not). So each expert's rows are
gathered into an allocation of their own, and its weights start where its field starts in the record, which is
128-byte aligned in every slot: the operands look the same in whatever slot and group an expert comes. How many rows
are computed follows from how many there are (`_filled_up`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from kernels import pointwise
from kernels.formats import QUANTISED, RecordLayout
from kernels.linear import linear as fixed_linear
from kernels.moe_align import Alignment, Blocks
from kernels.quant import Fp8Block, Fp8Tensor, Matrix, Mxfp4, Nvfp4, dequant, quantised_inputs


class InputScales(NamedTuple):
    """Of a layer whose experts quantise their inputs: one for x, one for the input of down; float32, above 0."""

    gate_up: float
    down: float


NO_SCALES = InputScales(1.0, 1.0)
"""For kernels of experts that take their inputs as they are: it is not read."""


SWIGLU_ALPHA = 1.702
"""Of the clamped SwiGLU's sigmoid."""


def matrices(record: torch.Tensor, layout: RecordLayout, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [2I, H] and down [H, I] of a `record` [record_nbytes] uint8; unquantised ones are views of it."""
    if layout.format not in QUANTISED:
        return _field(record, layout, "gate_up", dtype), _field(record, layout, "down", dtype)
    gate, up = (dequant(projection(record, layout, "gate_up", part)) for part in range(2))
    return torch.cat([gate, up]).to(dtype), dequant(projection(record, layout, "down")).to(dtype)


def biases(record: torch.Tensor, layout: RecordLayout, dtype: torch.dtype) -> tuple[torch.Tensor | float, ...]:
    """gate_up's [2I] and down's [H], 0 where there are none."""
    if not layout.kind.bias:
        return 0.0, 0.0
    return tuple(_field(record, layout, f"{name}_bias", torch.float32).to(dtype) for name in ("gate_up", "down"))


def linear(x: torch.Tensor, matrix: torch.Tensor, input_scale: float | None, fixed: int = 0) -> torch.Tensor:
    """x W^T, by `fixed` rows at a time if that is not 0; with an input scale, of x as it is quantised under that."""
    inputs = x if input_scale is None else quantised_inputs(x, input_scale)
    product = fixed_linear(inputs, matrix, None, fixed) if fixed else functional.linear(inputs, matrix)
    return product if input_scale is None else (product.to(torch.float32) * input_scale).to(x.dtype)


def activation(gate: torch.Tensor, up: torch.Tensor, limit: float | None, fixed: bool = False) -> torch.Tensor:
    """silu(gate) * up, or with a limit gpt-oss' clamped SwiGLU (transformers, modeling_gpt_oss.py).

    If it is `fixed`, an element's bits do not depend on its place.
    """
    if limit is None:
        return (pointwise.silu if fixed else functional.silu)(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * (pointwise.sigmoid if fixed else torch.sigmoid)(gate * SWIGLU_ALPHA))


def projection(record: torch.Tensor, layout: RecordLayout, name: str, part: int = 0) -> Matrix:
    """Of field `name`: "gate_up", of which `part` 0 is gate and 1 is up, or "down"."""
    parts = 2 if name == "gate_up" else 1

    def field(suffix: str, dtype: torch.dtype) -> torch.Tensor:
        return _field(record, layout, name + suffix, dtype).chunk(parts)[part]

    match layout.format:
        case "nvfp4":
            scales = field("_scale", torch.float8_e4m3fn)
            return Nvfp4(field("", torch.uint8), scales, field("_global", torch.float32)[0])
        case "mxfp4":
            return Mxfp4(field("", torch.uint8), field("_scale", torch.uint8))
        case "fp8_block":
            return Fp8Block(field("", torch.float8_e4m3fn), field("_scale", torch.float32), layout.kind.block)
        case "fp8_tensor":
            return Fp8Tensor(field("", torch.float8_e4m3fn), field("_scale", torch.float32)[0])
    raise ValueError(f"{layout.format} experts are not quantised")


def _field(record: torch.Tensor, layout: RecordLayout, name: str, dtype: torch.dtype) -> torch.Tensor:
    field = layout.field(name)
    return record[field.offset : field.offset + field.nbytes].view(dtype).view(field.shape)


def grouped_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    alignment: Alignment,
    pool: torch.Tensor,
    layout: RecordLayout,
    experts: Sequence[int],
    slots: Sequence[int],
    out_rows: torch.Tensor,
    input_scales: InputScales | None,
    fixed: int = 0,
) -> None:
    k = weights.shape[1]
    routes = alignment.routes.to(torch.int64)
    offsets = alignment.offsets.tolist()
    row_weights = weights.reshape(-1, 1)
    for expert, slot in zip(experts, slots, strict=True):
        rows = routes[offsets[expert] : offsets[expert + 1]]
        if rows.shape[0] == 0:
            continue
        gate_up_matrix, down_matrix = matrices(pool[slot], layout, x.dtype)
        gate_up_bias, down_bias = biases(pool[slot], layout, x.dtype)
        in_scale, down_scale = input_scales or (None, None)
        computed = rows if fixed else _filled_up(rows)
        gate_up = linear(x[computed // k], gate_up_matrix, in_scale, fixed) + gate_up_bias
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = activation(gate, up, layout.kind.swiglu_limit, fixed > 0)
        out = linear(hidden, down_matrix, down_scale, fixed)
        if computed is not rows:
            out = out[: rows.shape[0]]
        out_rows[rows] = ((out + down_bias) * row_weights[rows]).to(out_rows.dtype)


def _filled_up(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [n] and its last element again, up to the next number that has three significant bits.

    For each number of rows oneDNN compiles code, in 0.3 ms a product. An expert has any number of a chunk's rows; of
    these numbers there are four from each power of two to the next, and a quarter more is computed at most.
    """
    count = rows.shape[0]
    more = -count % (1 << max(0, count.bit_length() - 3))
    return torch.cat([rows, rows[-1:].expand(more)]) if more else rows


def grouped_gemm_slots(
    x: torch.Tensor,
    weights: torch.Tensor,
    blocks: Blocks,
    pool: torch.Tensor,
    layout: RecordLayout,
    slot_of: torch.Tensor,
    span: torch.Tensor,
    out_rows: torch.Tensor,
    input_scales: InputScales | None,
    fixed: int = 0,
) -> None:
    begin, end = span.tolist()
    starts = blocks.starts.tolist()
    slot = slot_of.tolist()
    experts = [e for e in range(begin, end) if starts[e] < starts[e + 1] and slot[e] >= 0]
    slots = [slot[e] for e in experts]
    alignment = Alignment(blocks.routes, _offsets(blocks))
    grouped_gemm(x, weights, alignment, pool, layout, experts, slots, out_rows, input_scales, fixed)


def _offsets(blocks: Blocks) -> torch.Tensor:
    """[E + 1] int32 of the alignment that the blocks were cut from."""
    used = int(blocks.starts[-1])
    counts = torch.zeros(blocks.starts.shape[0], dtype=torch.int32, device=blocks.starts.device)
    counts.index_add_(0, blocks.expert[:used] + 1, blocks.rows[:used])
    return counts.cumsum(0).to(torch.int32)


def combine(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    if tokens == 0:
        return rows
    by_token = rows.view(tokens, -1, rows.shape[1])
    total = by_token[:, 0].to(torch.float32)
    for k in range(1, by_token.shape[1]):
        total = total + by_token[:, k]
    return total.to(rows.dtype)
