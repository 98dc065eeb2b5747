"""The experts of a group over the rows routed to them, and the sum over each token's K experts."""

import math
from collections.abc import Sequence

import torch

from kernels.formats import QUANTISED, RecordLayout
from kernels.grouped_gemm import cost, ref
from kernels.grouped_gemm.ref import InputScales
from kernels.linear import rows_at_once
from kernels.moe_align import Alignment, Blocks, max_blocks
from kernels.shared_memory import shared_nbytes

__all__ = [
    "InputScales",
    "arrange",
    "block_rows",
    "combine",
    "fixed_rows",
    "grouped_gemm",
    "grouped_gemm_slots",
    "variant",
]

_DTYPES = {
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "float32": (torch.float32,),
    **dict.fromkeys(QUANTISED, (torch.bfloat16, torch.float32)),
}
"""Of x, by format."""

_PACKED = ("nvfp4", "mxfp4")
"""Formats with two codes in a byte, whose kernels read x with its even columns first."""


def grouped_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    alignment: Alignment,
    pool: torch.Tensor,
    layout: RecordLayout,
    experts: Sequence[int],
    slots: Sequence[int],
    out_rows: torch.Tensor,
    input_scales: InputScales | None = None,
    fixed: int = 0,
) -> None:
    """Writes `weights[t, k] * down(act(gate(x[t]), up(x[t])))` into `out_rows[t * K + k]` for this group's experts.

    Biases and `act` are those of `layout.kind`; see kernels.formats.ExpertFormat.
    `x` is [T, H] in the layout's element type (of quantised experts bfloat16, or float32), `weights` [T, K] float32,
    `pool` [pool_slots, record_nbytes] uint8, `out_rows` [T * K, H] like x; expert `experts[i]` is read from slot
    `slots[i]`. `input_scales` are the layer's if `layout.kind.quantised_inputs`, None if not.
    Rows routed to experts outside the group are left alone. The values of a row depend on x, the routing and the
    weights only: not on the slot, the size of the pool or the cut into groups; with `fixed`, which is what `fixed_rows`
    gives, on its own x, experts and weights only. ValueError for shapes or types that do
    not fit together.
    """
    _expect_rows(x, weights, alignment.routes, pool, layout, out_rows)
    _expect_scales(layout, input_scales)
    if len(experts) != len(slots):
        raise ValueError(f"{len(experts)} experts but {len(slots)} slots")
    if any(not 0 <= slot < pool.shape[0] for slot in slots):
        raise ValueError(f"slots must be in 0..{pool.shape[0] - 1}, not {list(slots)}")
    if any(not 0 <= expert < alignment.offsets.shape[0] - 1 for expert in experts):
        raise ValueError(f"experts must be in 0..{alignment.offsets.shape[0] - 2}, not {list(experts)}")
    ref.grouped_gemm(x, weights, alignment, pool, layout, experts, slots, out_rows, input_scales, fixed)


def fixed_rows(layout: RecordLayout, dtype: torch.dtype) -> int:
    """How many rows at a time `grouped_gemm` multiplies with one matrix, for x of `dtype`, if their order of sums is to
    be fixed: see kernels.linear.rows_at_once, which tries it with matrices of these shapes."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2 * layout.intermediate, layout.hidden), (layout.hidden, layout.intermediate))
    return min(rows_at_once(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes)


def block_rows(
    tokens: int, k: int, num_experts: int, layout: RecordLayout, device: torch.device, fixed: bool = False
) -> int:
    """Rows of the blocks that `grouped_gemm_slots` wants for T tokens of K routes to E experts on the device."""
    return variant(tokens, k, num_experts, layout, device, fixed).gate_up.block_m


def variant(
    tokens: int, k: int, num_experts: int, layout: RecordLayout, device: torch.device, fixed: bool = False
) -> cost.Tiles:
    """The tiles of `grouped_gemm_slots` on the device: launches for which they are equal run the same kernels.

    If they are `fixed`, those of any number of tokens are equal.
    """
    if fixed:
        return cost.fixed_tiles(layout.kind, shared_nbytes(device))
    return cost.tiles(tokens, k, num_experts, layout.kind, shared_nbytes(device))


def grouped_gemm_slots(
    x: torch.Tensor,
    weights: torch.Tensor,
    blocks: Blocks,
    pool: torch.Tensor,
    layout: RecordLayout,
    slot_of: torch.Tensor,
    span: torch.Tensor,
    max_routed: int,
    out_rows: torch.Tensor,
    arranged: bool = False,
    mid: torch.Tensor | None = None,
    input_scales: InputScales | None = None,
    fixed: bool = False,
) -> None:
    """`grouped_gemm` over the experts `span[0] .. span[1] - 1` that have a slot; what decides is on the device.

    `blocks` are cut to `block_rows(...)`; `slot_of` [E] int32 is each expert's slot, read for experts of the span that
    have routes, and negative for those to leave out (their rows are left alone); `span` [2] int32; `max_routed` is a
    bound on the number of experts of the span that have routes, which only sizes the launch. `arranged` says that x
    comes from `arrange` under the same `input_scales`, `mid` [T * K, I] like x is space to work in, made anew if it is
    None. On a CUDA device nothing waits for it, x for quantised experts is bfloat16, and values in tensors are not
    checked. The values of a row depend on x and the routing of the whole step, never on slots or on how the experts
    are cut into spans; if they are `fixed`, with blocks that are too, on its own x, experts and weights only.
    ValueError for shapes or types that do not fit together.
    """
    _expect_rows(x, weights, blocks.routes, pool, layout, out_rows)
    _expect_scales(layout, input_scales)
    num_experts = blocks.starts.shape[0] - 1
    _expect("slot_of", slot_of, (num_experts,), torch.int32)
    _expect("span", span, (2,), torch.int32)
    tokens, k = weights.shape
    tiles = variant(tokens, k, num_experts, layout, x.device, fixed)
    if blocks.block_rows != tiles.gate_up.block_m:
        raise ValueError(f"blocks must have {tiles.gate_up.block_m} rows, not {blocks.block_rows}")
    if not 0 <= max_routed <= num_experts:
        raise ValueError(f"max_routed must be in 0..{num_experts}, not {max_routed}")
    if mid is not None:
        _expect("mid", mid, (tokens * k, layout.intermediate), x.dtype)
    if not x.is_cuda:
        rows = fixed_rows(layout, x.dtype) if fixed else 0
        ref.grouped_gemm_slots(x, weights, blocks, pool, layout, slot_of, span, out_rows, input_scales, rows)
        return
    if layout.format in QUANTISED and x.dtype != torch.bfloat16:
        raise ValueError(f"x must be torch.bfloat16 for {layout.format} on a CUDA device, not {x.dtype}")
    if mid is None:
        mid = torch.empty(tokens * k, layout.intermediate, dtype=x.dtype, device=x.device)
    if not (pool.is_contiguous() and out_rows.is_contiguous() and mid.is_contiguous()):
        raise ValueError("pool, out_rows and mid must be contiguous")
    scales = input_scales or ref.NO_SCALES
    if input_scales and not arranged:
        x = _quantised(x, input_scales)
    if tiles.gate_up.block_m == 1:
        from kernels.grouped_gemm import tri_few

        tri_few.grouped_gemm_slots(x, weights, blocks, pool, layout, slot_of, span, tiles, mid, out_rows, scales)
        return
    from kernels.grouped_gemm import tri

    if layout.format in _PACKED and not (arranged and _even_first(x, layout)):
        x = tri.even_first(x)
    grid_blocks = max_blocks(tokens * k, max_routed, blocks.block_rows)
    tri.grouped_gemm_slots(x, weights, blocks, pool, layout, slot_of, span, grid_blocks, tiles, mid, out_rows, scales)


def arrange(x: torch.Tensor, layout: RecordLayout, input_scales: InputScales | None = None) -> torch.Tensor:
    """x [T, H] as the kernels read it: done once for a layer, it need not be done by each `grouped_gemm_slots`.

    `input_scales` as there.
    """
    _expect_scales(layout, input_scales)
    if not x.is_cuda:
        return x
    if input_scales:
        x = _quantised(x, input_scales)
    if not _even_first(x, layout):
        return x
    from kernels.grouped_gemm import tri

    return tri.even_first(x)


def _even_first(x: torch.Tensor, layout: RecordLayout) -> bool:
    """Whether `arrange` puts even columns first.

    Of few tokens most layers read x as it is, so that those of them that do not must do it themselves.
    """
    return layout.format in _PACKED and x.shape[0] > cost.FEW_TOKENS


def _quantised(x: torch.Tensor, input_scales: InputScales) -> torch.Tensor:
    from kernels.grouped_gemm import tri_inputs

    return tri_inputs.quantised(x, input_scales.gate_up)


def combine(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Sum of each token's K rows, in the order of k, in float32. `rows` is [T * K, H]; returns [T, H] like rows.

    ValueError if the rows are not a multiple of `tokens`.
    """
    if rows.ndim != 2 or (rows.shape[0] % tokens if tokens else rows.shape[0]):
        raise ValueError(f"rows must be [T * K, H] for T = {tokens}, not {tuple(rows.shape)}")
    if not rows.is_cuda:
        return ref.combine(rows, tokens)
    from kernels.grouped_gemm import tri

    return tri.combine(rows.contiguous(), tokens)


def _expect_rows(
    x: torch.Tensor,
    weights: torch.Tensor,
    routes: torch.Tensor,
    pool: torch.Tensor,
    layout: RecordLayout,
    out_rows: torch.Tensor,
) -> None:
    tokens, k = weights.shape
    dtypes = _DTYPES.get(layout.format)
    if dtypes is None:
        raise ValueError(f"no grouped GEMM for expert format {layout.format!r}")
    dtype = x.dtype if x.dtype in dtypes else dtypes[0]
    _expect("x", x, (tokens, layout.hidden), dtype)
    _expect("weights", weights, (tokens, k), torch.float32)
    _expect("out_rows", out_rows, (tokens * k, layout.hidden), dtype)
    _expect("pool", pool, (pool.shape[0], layout.record_nbytes), torch.uint8)
    _expect("routes", routes, (tokens * k,), torch.int32)


def _expect_scales(layout: RecordLayout, input_scales: InputScales | None) -> None:
    if layout.kind.quantised_inputs != (input_scales is not None):
        raise ValueError(f"input_scales must be the layer's two, for quantised inputs alone, not {input_scales}")
    if input_scales and not all(0 < scale < math.inf for scale in input_scales):
        raise ValueError(f"input_scales must be above 0 and finite, not {input_scales}")


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
