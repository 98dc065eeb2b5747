"""The experts of a group over the rows routed to them, and the sum over each token's K experts."""

from collections.abc import Sequence

import torch

from kernels.formats import RecordLayout
from kernels.grouped_gemm import ref
from kernels.moe_align import Alignment

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def grouped_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    alignment: Alignment,
    pool: torch.Tensor,
    layout: RecordLayout,
    experts: Sequence[int],
    slots: Sequence[int],
    out_rows: torch.Tensor,
) -> None:
    """Writes `weights[t, k] * down(silu(gate(x[t])) * up(x[t]))` into `out_rows[t * K + k]` for this group's experts.

    `x` is [T, H] in the layout's element type, `weights` [T, K] float32, `pool` [pool_slots, record_nbytes] uint8,
    `out_rows` [T * K, H] like x; expert `experts[i]` is read from slot `slots[i]`. Rows routed to experts outside the
    group are left alone. The values of a row depend on x, the routing and the weights only: not on the slot, the size
    of the pool or the cut into groups. ValueError for shapes or types that do not fit together.
    """
    tokens, k = weights.shape
    dtype = _DTYPES.get(layout.format)
    if dtype is None:
        raise ValueError(f"no grouped GEMM for expert format {layout.format!r}")
    _expect("x", x, (tokens, layout.hidden), dtype)
    _expect("weights", weights, (tokens, k), torch.float32)
    _expect("out_rows", out_rows, (tokens * k, layout.hidden), dtype)
    _expect("pool", pool, (pool.shape[0], layout.record_nbytes), torch.uint8)
    _expect("routes", alignment.routes, (tokens * k,), torch.int32)
    if len(experts) != len(slots):
        raise ValueError(f"{len(experts)} experts but {len(slots)} slots")
    if any(not 0 <= slot < pool.shape[0] for slot in slots):
        raise ValueError(f"slots must be in 0..{pool.shape[0] - 1}, not {list(slots)}")
    if any(not 0 <= expert < alignment.offsets.shape[0] - 1 for expert in experts):
        raise ValueError(f"experts must be in 0..{alignment.offsets.shape[0] - 2}, not {list(experts)}")
    ref.grouped_gemm(x, weights, alignment, ref.slot_views(pool, layout, dtype), experts, slots, out_rows)


def combine(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Sum of each token's K rows, in the order of k, in float32. `rows` is [T * K, H]; returns [T, H] like rows.

    ValueError if the rows are not a multiple of `tokens`.
    """
    if rows.ndim != 2 or (rows.shape[0] % tokens if tokens else rows.shape[0]):
        raise ValueError(f"rows must be [T * K, H] for T = {tokens}, not {tuple(rows.shape)}")
    return ref.combine(rows, tokens)


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
