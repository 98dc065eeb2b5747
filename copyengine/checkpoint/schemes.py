"""How checkpoint files spell one quantised linear: a `Scheme` is a table, the same for every family.

A family names a linear by its `...weight`; the tensors of the quantised linear have their suffixes in its place.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK

Kind = Literal["weight", "codes", "e4m3", "scales", "powers", "blocks", "factor", "global", "reciprocal"]
"""What a tensor in the files is to a field of a record: a weight that is not quantised; E2M1 codes, two to a byte; E4M3
codes; E4M3 scales or biased exponents of powers of two along K; scales of blocks; one scale of all; a float32 global of
such scales, or one over it."""

ELEMENT_TYPES: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "codes": ("U8",),
        "e4m3": ("F8_E4M3",),
        "scales": ("F8_E4M3",),
        "powers": ("U8", "F8_E8M0"),
        "blocks": ("F32", "BF16", "F16"),
        "factor": ("F32", "BF16", "F16"),
        "global": ("F32",),
        "reciprocal": ("F32",),
    }
)
"""As safetensors spells them, the usual one first. A tensor of kind "weight" has that of the checkpoint."""

SCALARS: frozenset[Kind] = frozenset({"factor", "global", "reciprocal"})
"""Kinds of one element, with shape [] or [1]."""

WEIGHT = "weight"
"""The last word of a linear's name."""


class SchemeTensor(Struct, frozen=True):
    """One tensor of a quantised linear."""

    suffix: str  # instead of WEIGHT
    field: str  # what the record's field for it adds to the field's name
    kind: Kind


class Scheme(Struct, frozen=True):
    """One way to write a quantised linear [N, K]."""

    name: str
    format: str  # of kernels.formats
    tensors: tuple[SchemeTensor, ...]  # the codes first
    input_scale: str  # suffix of the activations' scale, which may be there
    block: tuple[int, int] = (0, 0)  # of kind "blocks": rows and columns that share a scale
    input_kind: Kind = "global"  # of the activations' scale


def _e4m3(name: str, record: str, scale: str, kind: Kind, block: tuple[int, int] = (0, 0)) -> Scheme:
    """E4M3 codes under `weight` and their scales under `scale`."""
    tensors = SchemeTensor("weight", "", "e4m3"), SchemeTensor(scale, "_scale", kind)
    return Scheme(name, record, tensors, "input_scale", block)


MODELOPT = Scheme(
    "ModelOpt's NVFP4",
    "nvfp4",
    (
        SchemeTensor("weight", "", "codes"),
        SchemeTensor("weight_scale", "_scale", "scales"),
        SchemeTensor("weight_scale_2", "_global", "global"),
    ),
    "input_scale",
)

MODELOPT_FP8 = _e4m3("ModelOpt's FP8", "fp8_tensor", "weight_scale", "factor")

COMPRESSED_TENSORS = Scheme(
    "compressed-tensors' NVFP4",
    "nvfp4",
    (
        SchemeTensor("weight_packed", "", "codes"),
        SchemeTensor("weight_scale", "_scale", "scales"),
        SchemeTensor("weight_global_scale", "_global", "reciprocal"),
    ),
    "input_global_scale",
    input_kind="reciprocal",
)

COMPRESSED_MXFP4 = Scheme(
    "compressed-tensors' MXFP4",
    "mxfp4",
    (SchemeTensor("weight_packed", "", "codes"), SchemeTensor("weight_scale", "_scale", "powers")),
    "",
)

FUSED_MXFP4 = Scheme("gpt-oss' MXFP4", "mxfp4", (), "")
"""Of tensors of all experts of a layer, whose names only a dialect of the family tells."""

COMPRESSED_FP8 = _e4m3("compressed-tensors' FP8 per tensor", "fp8_tensor", "weight_scale", "factor")

ALL_COLUMNS = 1 << 20
"""Columns of a block that has any matrix' in it."""

COMPRESSED_FP8_CHANNEL = _e4m3(
    "compressed-tensors' FP8 per channel", "fp8_block", "weight_scale", "blocks", (1, ALL_COLUMNS)
)
"""A scale for each row: blocks of one row, [N, 1] of them."""

FP8 = _e4m3("FP8 per tensor", "fp8_tensor", "weight_scale", "factor")
"""quant_method "fp8" without blocks."""

FP8_INV = _e4m3("FP8 per tensor", "fp8_tensor", "weight_scale_inv", "factor")
"""The same as transformers writes it. The scale is what codes are multiplied by, in spite of its name."""


def fp8_block(rows: int, columns: int) -> Scheme:
    """quant_method "fp8" in blocks."""
    return _e4m3(f"FP8 in blocks of {rows} x {columns}", "fp8_block", "weight_scale_inv", "blocks", (rows, columns))


def compressed_fp8_block(rows: int, columns: int) -> Scheme:
    """compressed-tensors' "float-quantized" with strategy "block"."""
    name = f"compressed-tensors' FP8 in blocks of {rows} x {columns}"
    return _e4m3(name, "fp8_block", "weight_scale", "blocks", (rows, columns))


SCHEMES = (
    MODELOPT, COMPRESSED_TENSORS, COMPRESSED_MXFP4, MODELOPT_FP8, COMPRESSED_FP8_CHANNEL, fp8_block(128, 128)
)  # fmt: skip
"""One of each way to spell a linear."""

INPUT_SCALES = (".input_scale", ".input_global_scale")
"""What scales of activations end in."""

SIGNS = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed", "weight_global_scale")
"""Suffixes that only a quantised linear has."""


def beside(source: str, suffix: str) -> str:
    """The name of the tensor with `suffix` of the linear whose weight is called `source`; "" if that is no linear's."""
    stem, dot, last = source.rpartition(".")
    return f"{stem}{dot}{suffix}" if last == WEIGHT else ""


def shape_of(scheme: Scheme, kind: Kind, rows: int, columns: int) -> tuple[int, ...] | None:
    """The shape of the tensor of that kind of a linear [N, K]; [1] for a scalar. None if there is none of that size."""
    per_row = {"codes": 2, "scales": NVFP4_BLOCK, "powers": MXFP4_BLOCK}.get(kind)
    if per_row is not None:
        return None if columns % per_row else (rows, columns // per_row)
    if kind == "blocks":
        return -(-rows // scheme.block[0]), -(-columns // scheme.block[1])
    return (1,) if kind in SCALARS else (rows, columns)


def fits(kind: Kind, dtype: str, shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a tensor of the files with that element type and shape may be one of `kind`, whose shape is `wanted`."""
    if dtype not in ELEMENT_TYPES[kind]:
        return False
    return tuple(shape) == tuple(wanted) or (kind in SCALARS and not shape)
