"""Expert record layouts per quantisation format.

One table, read by the loader, the copy engine and the kernels: `FORMATS[name]` says which tensors one expert of
hidden size H and intermediate size I has, and `layout` places them in one contiguous record, each field and the
record as a whole aligned to `ALIGNMENT` bytes. A further format is a further row. No torch in here.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec import Struct

ALIGNMENT = 128
"""Bytes; the alignment of every field and of the record, so that a slot can be read in whole cache lines."""

ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1, "float8_e4m3": 1}
)
"""Bytes per element of each element type a field may have."""


class ExpertFormat(Struct, frozen=True):
    """What one expert's record holds and what is computed of it, beside the sizes H and I.

    Its output is down(act(gate(x), up(x))), each projection with its bias if it has one.
    """

    name: str = ""  # of FORMATS; "": not quantised, in the element type that a load asks for
    block: tuple[int, int] = (0, 0)  # rows and columns that share a scale, of formats that may choose them
    bias: bool = False  # fields gate_up_bias [2I] and down_bias [H], float32
    swiglu_limit: float | None = None  # act is gpt-oss' clamped SwiGLU with this limit; None: silu(gate) * up
    quantised_inputs: bool = False  # x and act(...) are rounded to E2M1 under the layer's input scales (W4A4)


class FieldSpec(Struct, frozen=True):
    """One tensor of an expert before it is placed: its name, element type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Field(Struct, frozen=True):
    """One tensor of an expert, placed: `offset` and `nbytes` in bytes from the start of the record."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class RecordLayout(Struct, frozen=True):
    """How one expert lies in its record."""

    kind: ExpertFormat
    hidden: int  # H
    intermediate: int  # I
    fields: tuple[Field, ...]
    record_nbytes: int

    @property
    def format(self) -> str:
        """A name of FORMATS."""
        return self.kind.name

    def field(self, name: str) -> Field:
        """The field called `name`; KeyError if the format has none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(f"format {self.format} has no field {name!r}")


Fields = Callable[[ExpertFormat, int, int], tuple[FieldSpec, ...]]
"""Of (format, H, I)."""


def _unquantised(dtype: str) -> Fields:
    """gate and up rows stacked, [2I, H] (gate first), then down, [H, I]."""

    def fields(_: ExpertFormat, hidden: int, intermediate: int) -> tuple[FieldSpec, ...]:
        return (
            FieldSpec("gate_up", dtype, (2 * intermediate, hidden)),
            FieldSpec("down", dtype, (hidden, intermediate)),
        )

    return fields


NVFP4_BLOCK = 16
"""Neighbouring k that share one scale."""

MXFP4_BLOCK = 32
"""Neighbouring k that share one scale."""


def _nvfp4(_: ExpertFormat, hidden: int, intermediate: int) -> tuple[FieldSpec, ...]:
    """w[n, k] = E2M1 code * scale[n, k // 16] * global of its projection.

    Codes are packed two to a byte along k, the even k in the low nibble. `gate_up_global` holds gate's, then up's.
    """
    _expect_multiples("nvfp4", NVFP4_BLOCK, hidden, intermediate)
    return (
        FieldSpec("gate_up", "uint8", (2 * intermediate, hidden // 2)),
        FieldSpec("gate_up_scale", "float8_e4m3", (2 * intermediate, hidden // NVFP4_BLOCK)),
        FieldSpec("gate_up_global", "float32", (2,)),
        FieldSpec("down", "uint8", (hidden, intermediate // 2)),
        FieldSpec("down_scale", "float8_e4m3", (hidden, intermediate // NVFP4_BLOCK)),
        FieldSpec("down_global", "float32", (1,)),
    )


def _mxfp4(_: ExpertFormat, hidden: int, intermediate: int) -> tuple[FieldSpec, ...]:
    """w[n, k] = E2M1 code * 2^(scale[n, k // 32] - 127) (OCP MX; a scale of 255 is no number).

    Codes are packed two to a byte along k, the even k in the low nibble.
    """
    _expect_multiples("mxfp4", MXFP4_BLOCK, hidden, intermediate)
    return (
        FieldSpec("gate_up", "uint8", (2 * intermediate, hidden // 2)),
        FieldSpec("gate_up_scale", "uint8", (2 * intermediate, hidden // MXFP4_BLOCK)),
        FieldSpec("down", "uint8", (hidden, intermediate // 2)),
        FieldSpec("down_scale", "uint8", (hidden, intermediate // MXFP4_BLOCK)),
    )


def _fp8_block(kind: ExpertFormat, hidden: int, intermediate: int) -> tuple[FieldSpec, ...]:
    """w[n, k] = E4M3 code * scale[n // rows, k // columns], for blocks of rows x columns that need not come out even.

    gate and up each have scales of their own, [ceil(I / rows), ceil(H / columns)]: `gate_up_scale` holds gate's, then
    up's.
    """
    rows, columns = kind.block
    if rows < 1 or columns < 1:
        raise ValueError(f"fp8_block needs blocks of at least 1 x 1, not {rows} x {columns}")
    return (
        FieldSpec("gate_up", "float8_e4m3", (2 * intermediate, hidden)),
        FieldSpec("gate_up_scale", "float32", (2 * -(-intermediate // rows), -(-hidden // columns))),
        FieldSpec("down", "float8_e4m3", (hidden, intermediate)),
        FieldSpec("down_scale", "float32", (-(-hidden // rows), -(-intermediate // columns))),
    )


def _fp8_tensor(_: ExpertFormat, hidden: int, intermediate: int) -> tuple[FieldSpec, ...]:
    """w[n, k] = E4M3 code * scale of its projection. `gate_up_scale` holds gate's, then up's."""
    return (
        FieldSpec("gate_up", "float8_e4m3", (2 * intermediate, hidden)),
        FieldSpec("gate_up_scale", "float32", (2,)),
        FieldSpec("down", "float8_e4m3", (hidden, intermediate)),
        FieldSpec("down_scale", "float32", (1,)),
    )


def _expect_multiples(name: str, block: int, hidden: int, intermediate: int) -> None:
    if hidden % block or intermediate % block:
        raise ValueError(f"{name} needs multiples of {block}: hidden {hidden}, intermediate {intermediate}")


FORMATS: Mapping[str, Fields] = MappingProxyType(
    {
        "bfloat16": _unquantised("bfloat16"),
        "float16": _unquantised("float16"),
        "float32": _unquantised("float32"),
        "nvfp4": _nvfp4,
        "mxfp4": _mxfp4,
        "fp8_block": _fp8_block,
        "fp8_tensor": _fp8_tensor,
    }
)
"""A row may have fields of several element types and of any rank, () for a scalar."""

QUANTISED = frozenset(FORMATS) - {"bfloat16", "float16", "float32"}
"""Formats whose values have another element type than x."""


def _biases(kind: ExpertFormat, hidden: int, intermediate: int) -> tuple[FieldSpec, ...]:
    if not kind.bias:
        return ()
    return FieldSpec("gate_up_bias", "float32", (2 * intermediate,)), FieldSpec("down_bias", "float32", (hidden,))


def _check(kind: ExpertFormat) -> None:
    if kind.name not in FORMATS:
        raise ValueError(f"unknown expert format {kind.name!r}; known: {', '.join(FORMATS)}")
    if kind.block != (0, 0) and kind.name != "fp8_block":
        raise ValueError(f"{kind.name} has no blocks of a size to choose, such as {kind.block}; fp8_block has")
    if kind.quantised_inputs and kind.name != "nvfp4":
        raise ValueError(f"{kind.name} experts have no quantised inputs; nvfp4 ones may")
    if kind.swiglu_limit is not None and not kind.swiglu_limit > 0:
        raise ValueError(f"swiglu_limit must be above 0, not {kind.swiglu_limit}")


def align(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def layout(kind: ExpertFormat | str, hidden: int, intermediate: int) -> RecordLayout:
    """The record layout of one expert; a name alone stands for that format without anything more.

    ValueError for an unknown format, and for a size or anything else that it cannot have.
    """
    kind = ExpertFormat(kind) if isinstance(kind, str) else kind
    _check(kind)
    if hidden < 1 or intermediate < 1:
        raise ValueError(f"hidden ({hidden}) and intermediate ({intermediate}) must be at least 1")
    fields: list[Field] = []
    offset = 0
    for spec in (*FORMATS[kind.name](kind, hidden, intermediate), *_biases(kind, hidden, intermediate)):
        nbytes = ITEMSIZE[spec.dtype] * math.prod(spec.shape)
        fields.append(Field(spec.name, spec.dtype, spec.shape, offset, nbytes))
        offset = align(offset + nbytes)
    return RecordLayout(kind, hidden, intermediate, tuple(fields), offset)
