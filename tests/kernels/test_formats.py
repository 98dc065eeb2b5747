"""layout: against sizes computed by hand, and against the rules every record must keep."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import formats
from kernels.formats import ALIGNMENT, FORMATS, ITEMSIZE, ExpertFormat, FieldSpec, align, layout


def test_a_record_by_hand() -> None:
    """Qwen3-30B-A3B: 2 x 768 x 2048 and 2048 x 768 elements of two bytes."""
    record = layout("bfloat16", 2048, 768)
    assert [(f.name, f.shape, f.offset, f.nbytes) for f in record.fields] == [
        ("gate_up", (1536, 2048), 0, 6_291_456),
        ("down", (2048, 768), 6_291_456, 3_145_728),
    ]
    assert record.record_nbytes == 9_437_184


def test_odd_sizes_are_padded() -> None:
    record = layout("float16", 3, 5)
    assert [(f.offset, f.nbytes) for f in record.fields] == [(0, 60), (128, 30)]
    assert record.record_nbytes == 256


@pytest.mark.parametrize(("nbytes", "aligned"), [(0, 0), (1, 128), (127, 128), (128, 128), (129, 256)])
def test_align(nbytes: int, aligned: int) -> None:
    assert align(nbytes) == aligned


def test_an_nvfp4_record_by_hand() -> None:
    """Qwen3.8-Flash-Next: 2,764,800 bytes of codes and scales, and 128 for the globals of either matrix."""
    record = layout("nvfp4", 2560, 640)
    assert [(f.name, f.dtype, f.shape, f.offset) for f in record.fields] == [
        ("gate_up", "uint8", (1280, 1280), 0),
        ("gate_up_scale", "float8_e4m3", (1280, 160), 1_638_400),
        ("gate_up_global", "float32", (2,), 1_843_200),
        ("down", "uint8", (2560, 320), 1_843_328),
        ("down_scale", "float8_e4m3", (2560, 40), 2_662_528),
        ("down_global", "float32", (1,), 2_764_928),
    ]
    assert record.record_nbytes == 2_764_800 + 2 * 128


def test_an_mxfp4_record_by_hand() -> None:
    """gpt-oss-20b: 2 x 2880 x 2880 and 2880 x 2880 codes of half a byte, a scale for 32 of them, and biases."""
    record = layout(ExpertFormat("mxfp4", bias=True, swiglu_limit=7.0), 2880, 2880)
    assert [(f.name, f.dtype, f.shape, f.offset) for f in record.fields] == [
        ("gate_up", "uint8", (5760, 1440), 0),
        ("gate_up_scale", "uint8", (5760, 90), 8_294_400),
        ("down", "uint8", (2880, 1440), 8_812_800),
        ("down_scale", "uint8", (2880, 90), 12_960_000),
        ("gate_up_bias", "float32", (5760,), 13_219_200),
        ("down_bias", "float32", (2880,), 13_242_240),
    ]
    assert record.record_nbytes == 13_253_760


def test_fp8_records_by_hand() -> None:
    """Blocks that come out even of neither size: gate and up have two rows of scales each, down three."""
    record = layout(ExpertFormat("fp8_block", block=(128, 64)), 260, 130)
    assert [(f.name, f.dtype, f.shape, f.offset) for f in record.fields] == [
        ("gate_up", "float8_e4m3", (260, 260), 0),
        ("gate_up_scale", "float32", (4, 5), 67_712),
        ("down", "float8_e4m3", (260, 130), 67_840),
        ("down_scale", "float32", (3, 3), 101_760),
    ]
    fields = layout("fp8_tensor", 260, 130).fields
    assert [f.shape for f in fields] == [(260, 260), (2,), (260, 130), (1,)]
    assert fields[0].dtype == "float8_e4m3" and fields[1].dtype == "float32"


@given(
    name=st.sampled_from(sorted(FORMATS)),
    hidden=st.integers(1, 5000),
    intermediate=st.integers(1, 5000),
    block=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    bias=st.booleans(),
)
def test_fields_are_aligned_in_order_and_inside_the_record(
    name: str, hidden: int, intermediate: int, block: tuple[int, int], bias: bool
) -> None:
    if name in ("nvfp4", "mxfp4"):
        hidden, intermediate = 32 * hidden, 32 * intermediate
    kind = ExpertFormat(name, block if name == "fp8_block" else (0, 0), bias)
    record = layout(kind, hidden, intermediate)
    end = 0
    for field in record.fields:
        assert field.offset % ALIGNMENT == 0 and field.offset >= end
        assert field.nbytes == math.prod(field.shape) * ITEMSIZE[field.dtype]
        assert record.field(field.name) is field
        end = field.offset + field.nbytes
    assert record.record_nbytes == align(end)


def test_a_further_format_is_a_further_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, for a made-up format with fields of three types and of ranks 2, 1 and 0."""

    def rows(_: ExpertFormat, hidden: int, intermediate: int) -> tuple[FieldSpec, ...]:
        codes = FieldSpec("codes", "bfloat16", (2 * intermediate, hidden))
        return codes, FieldSpec("scales", "float32", (hidden,)), FieldSpec("global", "float16", ())

    monkeypatch.setattr(formats, "FORMATS", {"made up": rows})
    record = layout("made up", 33, 1)
    assert [(f.dtype, f.offset, f.nbytes) for f in record.fields] == [
        ("bfloat16", 0, 132),
        ("float32", 256, 132),
        ("float16", 512, 2),
    ]
    assert record.record_nbytes == 640


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"int3.*bfloat16"):
        layout("int3", 8, 8)
    for hidden, intermediate in ((0, 8), (8, 0), (-1, 8)):
        with pytest.raises(ValueError, match="at least 1"):
            layout("bfloat16", hidden, intermediate)
    for hidden, intermediate in ((24, 16), (16, 24)):
        with pytest.raises(ValueError, match=f"multiples of 16: hidden {hidden}, intermediate {intermediate}"):
            layout("nvfp4", hidden, intermediate)
    with pytest.raises(ValueError, match="multiples of 32: hidden 64, intermediate 48"):
        layout("mxfp4", 64, 48)
    for kind, match in (
        (ExpertFormat("fp8_block"), "at least 1 x 1, not 0 x 0"),
        (ExpertFormat("mxfp4", block=(1, 32)), "mxfp4 has no blocks of a size to choose"),
        (ExpertFormat("mxfp4", quantised_inputs=True), "mxfp4 experts have no quantised inputs"),
        (ExpertFormat("bfloat16", swiglu_limit=0.0), "above 0, not 0.0"),
    ):
        with pytest.raises(ValueError, match=match):
            layout(kind, 64, 64)
    with pytest.raises(KeyError, match="scales"):
        layout("bfloat16", 8, 8).field("scales")
