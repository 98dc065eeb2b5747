"""How checkpoint files spell one quantised linear: a `Scheme` is a table, the same for every family.

A family names a linear by its `...weight`; the tensors of the quantised linear have their suffixes in its place.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

Kind = Literal["weight", "codes", "scales", "global", "reciprocal"]
"""What a tensor in the files is to a field of a record: a weight that is not quantised, the bytes of codes or of E4M3
scales, a float32 global or one over it."""

ELEMENT_TYPES: Mapping[Kind, str] = MappingProxyType(
    {"codes": "U8", "scales": "F8_E4M3", "global": "F32", "reciprocal": "F32"}
)
"""As safetensors spells them. A tensor of kind "weight" has that of the checkpoint."""

WEIGHT = "weight"
"""The last word of a linear's name."""


class SchemeTensor(Struct, frozen=True):
    """One tensor of a quantised linear."""

    suffix: str  # instead of WEIGHT
    field: str  # what the record's field for it adds to the field's name
    kind: Kind


class Scheme(Struct, frozen=True):
    """One way to write a quantised linear [N, K]: codes [N, K / 2], scales [N, K / 16], a global [] or [1]."""

    name: str
    format: str  # of kernels.formats
    tensors: tuple[SchemeTensor, ...]  # the codes first
    input_scale: str  # suffix of the activations' scale, which may be there; it is not used


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

COMPRESSED_TENSORS = Scheme(
    "compressed-tensors' NVFP4",
    "nvfp4",
    (
        SchemeTensor("weight_packed", "", "codes"),
        SchemeTensor("weight_scale", "_scale", "scales"),
        SchemeTensor("weight_global_scale", "_global", "reciprocal"),
    ),
    "input_global_scale",
)

SCHEMES = (MODELOPT, COMPRESSED_TENSORS)

SIGNS = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed", "weight_global_scale")
"""Suffixes that only a quantised linear has, of these schemes and of FP8."""


def beside(source: str, suffix: str) -> str:
    """The name of the tensor with `suffix` of the linear whose weight is called `source`; "" if that is no linear's."""
    stem, dot, last = source.rpartition(".")
    return f"{stem}{dot}{suffix}" if last == WEIGHT else ""
