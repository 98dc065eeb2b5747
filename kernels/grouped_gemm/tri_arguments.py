"""What the Triton kernels of grouped_gemm are compiled for, beside their tiles."""

import functools
from typing import Any

import torch

from kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK, RecordLayout


@functools.cache
def has_fp8_type() -> bool:
    """Whether the current device, if there is one, has instructions for E4M3."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def format_arguments(layout: RecordLayout, matrix: str, fp8_type: bool) -> dict[str, Any]:
    """Constants of the kernels: what the record holds of `matrix`, "gate_up" or "down", and where."""
    kind, offsets = layout.kind, {field.name: field.offset for field in layout.fields}
    whole = max(layout.hidden, layout.intermediate)
    scale_rows, scale_columns = kind.block if kind.name == "fp8_block" else (whole, whole)
    return {
        "H": layout.hidden,
        "I": layout.intermediate,
        "RECORD": layout.record_nbytes,
        "FIELD": offsets[matrix],
        "SCALES": offsets.get(f"{matrix}_scale", 0),
        "GLOBALS": offsets.get(f"{matrix}_global", 0),
        "BIASES": offsets.get(f"{matrix}_bias", 0),  # 0: there are none
        "GROUP": {"nvfp4": NVFP4_BLOCK // 2, "mxfp4": MXFP4_BLOCK // 2}.get(kind.name, 0),
        "FP8": kind.name in ("fp8_block", "fp8_tensor"),
        "SCALE_N": scale_rows,
        "SCALE_K": scale_columns,
        "QUANTISED": kind.quantised_inputs,
        "FP8_TYPE": fp8_type,
    }
