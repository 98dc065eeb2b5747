"""Plain torch: one matmul per expert and projection.

Bit-identity on the CPU: MKL's float32 results change with the number of rows and with the alignment of the operands
(measured on an AMD EPYC with AVX-512, torch 2.13, 2026-11: float32 products of 1-7 rows differ between operands that
start on a 64-byte boundary and those that do not; bfloat16 and float16 ones did not). So each expert's rows are
gathered into an allocation of their own, and its weights start where its field starts in the record, which is
128-byte aligned in every slot: the operands look the same in whatever slot and group an expert comes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from kernels.formats import RecordLayout
from kernels.moe_align import Alignment


class SlotViews(NamedTuple):
    """The pool's tensors as strided views."""

    gate_up: torch.Tensor  # [pool_slots, 2I, H]
    down: torch.Tensor  # [pool_slots, H, I]


def slot_views(pool: torch.Tensor, layout: RecordLayout, dtype: torch.dtype) -> SlotViews:
    """Views of `pool` [pool_slots, record_nbytes] uint8 as the tensors of `layout`; nothing is copied."""

    def view(name: str) -> torch.Tensor:
        field = layout.field(name)
        return pool[:, field.offset : field.offset + field.nbytes].view(dtype).view(-1, *field.shape)

    return SlotViews(view("gate_up"), view("down"))


def grouped_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    alignment: Alignment,
    views: SlotViews,
    experts: Sequence[int],
    slots: Sequence[int],
    out_rows: torch.Tensor,
) -> None:
    k = weights.shape[1]
    routes = alignment.routes.to(torch.int64)
    offsets = alignment.offsets.tolist()
    row_weights = weights.reshape(-1, 1)
    for expert, slot in zip(experts, slots, strict=True):
        rows = routes[offsets[expert] : offsets[expert + 1]]
        if rows.shape[0] == 0:
            continue
        gate, up = functional.linear(x[rows // k], views.gate_up[slot]).chunk(2, dim=-1)
        out = functional.linear(functional.silu(gate) * up, views.down[slot])
        out_rows[rows] = (out * row_weights[rows]).to(out_rows.dtype)


def combine(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    if tokens == 0:
        return rows
    by_token = rows.view(tokens, -1, rows.shape[1])
    total = by_token[:, 0].to(torch.float32)
    for k in range(1, by_token.shape[1]):
        total = total + by_token[:, k]
    return total.to(rows.dtype)
