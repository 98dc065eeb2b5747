"""Streaming on the device against plain lists: in Triton's interpreter, compiled for sm_90, and on a GPU."""

from typing import Any

import pytest
import torch

from kernels import admit
from tests.kernels import stream_histories as histories
from tests.kernels.test_admit_triton import interpret


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_in_the_interpreter_equals_the_lists(count: int) -> None:
    """Random histories: records, flags, tables, counters, failures noted; admissions between, through the same ring.

    That the tables are right for a GEMM is in test_admit_triton.py::test_every_routed_row_is_computed_once.
    """
    interpret("tests.kernels.stream_histories", "0", str(count))


@pytest.mark.parametrize("experts", [8, 512, 4096])
def test_compiles_for_sm_90(experts: int) -> None:
    """No GPU is needed for it. The ring's words are read and written as admission does it."""
    pytest.importorskip("triton")
    from kernels.admit import tri_stream
    from tests.kernels.compiled_for import SHARED_NBYTES, compile_for

    types = dict.fromkeys(("slot_of", "tables", "flags", "control"), "*i32") | {"stats": "*i64"}
    types |= dict.fromkeys(tri_stream.SCALARS, "i32") | {"ring": "i64"}
    compiled = compile_for(90, tri_stream.request_kernel, types, tri_stream.launch_options(experts, 4))
    assert compiled.metadata.shared <= SHARED_NBYTES[90]
    lines = [line for line in compiled.asm["ptx"].splitlines() if ".sys." in line]
    assert [line.split("@p ")[1].split()[0] for line in lines] == [
        "ld.acquire.sys.global.b32",
        "ld.acquire.sys.global.b32",
        "ld.acquire.sys.global.b32",
        "st.release.sys.global.b32",
    ]


def test_what_is_refused() -> None:
    """Against the docstrings."""
    state = admit.new_state(2, 8, 6)
    admission = admit.new_device_admission(state, torch.zeros(9, dtype=torch.int32), 64, 4, first_flag=2)

    def new(count: int = 3, **how: Any) -> admit.DeviceStream:
        arguments = {"first_flag": 11, "first_slot": 6, "group_slots": 3, "groups": 3} | how
        return admit.new_device_stream(state, admission, torch.zeros(count, dtype=torch.int32), **arguments)

    stream = new()
    assert (stream.parts, stream.groups, stream.spans.tolist()) == (3, 3, [[0, 3], [3, 6], [6, 8]])
    assert new(first_flag=0, groups=2, count=2).groups == 2
    for wrong, match in (
        ({"group_slots": 0}, "at least 1"),
        ({"group_slots": 129}, "at most 128"),
        ({"groups": 0, "count": 0}, "at least 1"),
        ({"first_slot": 5}, "residents'"),
        ({"count": 2}, "flags must be"),
        ({"first_flag": 0}, "admission's"),
        ({"first_flag": 10}, "admission's"),
    ):
        with pytest.raises(ValueError, match=match):
            new(**wrong)
    for arguments in ((2, 0, 0), (-1, 0, 0), (0, 3, 0), (0, -1, 0), (0, 0, 3), (0, 0, -1)):
        with pytest.raises(ValueError, match=" of "):
            admit.request_part(state, admission, stream, *arguments)


@pytest.mark.gpu
def test_on_the_device_equals_the_lists() -> None:
    """300 random histories on small pools."""
    histories.run(0, 300, "cuda")
    histories.ring_stays_full("cuda")


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_on_the_device_equals_the_lists_in_large_pools() -> None:
    """12 random histories; most of the time goes into compiling for these sizes."""
    histories.run(1, 12, "cuda", histories.LARGE)
