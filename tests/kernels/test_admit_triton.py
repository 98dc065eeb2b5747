"""Admission in one kernel against the reference: in Triton's interpreter, compiled for sm_90, and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from copyengine import protocol, ring
from kernels import admit
from kernels.admit import device as on_device
from tests.kernels import admit_histories as histories
from tests.kernels import admitted_rows

ROOT = Path(__file__).parent.parent.parent
POINTERS = dict.fromkeys(("last_used", "bumps", "clock", "bumps", "stats", "oldest", "routing"), "*i64") | {
    "ring": "i64"
}
"""Arguments of the kernel that are not *i32 (tensors) or i32 (histories.SCALARS)."""
SHARED_NBYTES = 227 * 1024
"""What one program may have on sm_90."""


@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_in_the_interpreter_equals_the_reference(count: int) -> None:
    """Random histories on small pools: tables, query numbers and bounds, flags, counters, failures noted, and the
    records as read from a ring."""
    interpret("tests.kernels.admit_histories", "0", str(count))


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_every_routed_row_is_computed_once(count: int) -> None:
    """Of admitted layers, over-full ones too: against the reference over all experts, and counted row by row."""
    interpret("tests.kernels.admitted_rows", "0", str(count))


def interpret(module: str, *arguments: str) -> None:
    """Run a program in a process of its own, for Triton looks at TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("experts", "slots", "half_life"),
    [
        (8, 16, 0),
        (8, 16, 24),
        (512, 2100, 0),
        (512, 24576, 0),
        pytest.param(512, 2100, 384, marks=pytest.mark.slow),
        pytest.param(4096, 25000, 0, marks=pytest.mark.slow),
    ],
)
def test_compiles_for_sm_90(experts: int, slots: int, half_life: int, first: bool) -> None:
    """No GPU is needed for it. Shared memory fits; the sequence is stored with a release, `consumed` and twice
    the error that the host may set are loaded with an acquire, each by one thread, at the system's scope; no atomic
    touches the ring.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.admit import tri

    options = dict(tri.launch_options(experts, slots, 128, flags=experts + 3))
    warps = options.pop("num_warps")
    options |= {"FIRST": first, "HALF_LIFE": half_life} | ({} if half_life else {"bumps": None})
    kinds = {name: "i32" if name in tri.SCALARS else "*i32" for name in tri.admit_kernel.arg_names}
    kinds |= POINTERS | dict.fromkeys(options, "constexpr")
    compiled = triton.compile(
        ASTSource(tri.admit_kernel, kinds, constexprs=options),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    assert compiled.metadata.shared <= SHARED_NBYTES
    lines = [line for line in compiled.asm["ptx"].splitlines() if ".sys." in line]
    assert sorted(line.split("@p ")[1].split()[0] for line in lines) == [
        "ld.acquire.sys.global.b32",
        "ld.acquire.sys.global.b32",
        "ld.acquire.sys.global.b32",
        "st.release.sys.global.b32",
    ]


def test_the_ring_is_laid_out_as_its_reader_has_it() -> None:
    """kernels may not import copyengine: the numbers are written twice."""
    pytest.importorskip("triton")
    from kernels.admit import tri_ring as tri

    ours = (tri.RING_CONSUMED, tri.RING_CELLS, tri.CELL_WORDS, tri.CELL_PAIRS, on_device.MAX_PAIRS)
    theirs = (ring.CONSUMED, ring.CELLS, ring.CELL_WORDS, ring.PAIRS, protocol.MAX_QUERY)
    assert [getattr(word, "value", word) for word in ours] == list(theirs)
    assert (ring.SEQUENCE, ring.FLAG, ring.KIND, ring.LAYER, ring.COUNT) == (0, 1, 2, 3, 4)
    assert (ring.KINDS[tri.DEMAND.value], ring.KINDS[tri.STREAM.value]) == ("demand", "stream")


@pytest.mark.parametrize(
    ("distinct", "slots", "max_query", "queries"),
    [(512, 512, 128, 4), (513, 513, 128, 5), (512, 511, 128, 5), (300, 100, 128, 4), (1, 1, 1, 1), (2, 1, 1, 3)],
)
def test_most_queries(distinct: int, slots: int, max_query: int, queries: int) -> None:
    """By hand, and no random residency needs more."""
    assert admit.most_queries(distinct, slots, max_query) == queries
    assert admit.launches(distinct, slots, max_query, distinct) == (1 if distinct <= slots else queries)
    state = admit.new_state(1, distinct, slots)
    resident = torch.arange(0, distinct, 2)[:slots]
    admit.admit(state, 0, resident, resident)
    assert len(admit.cut(state, 0, torch.arange(distinct), max_query).queries) <= queries


def test_what_is_refused() -> None:
    """Sizes, flags, rings, layers and offsets that the kernel could only get wrong."""

    def new(experts: int = 8, slots: int = 8, count: int = 9, **how: int) -> admit.DeviceAdmission:
        arguments = {"ring": 64, "capacity": 4, "max_query": 2} | how
        return admit.new_device_admission(
            admit.new_state(1, experts, slots), torch.zeros(count, dtype=torch.int32), **arguments
        )

    new()
    for wrong, match in (
        ({"experts": 4097}, "at most 4096"),
        ({"slots": 32769}, "at most 4096, 32768"),
        ({"max_query": 129}, "and 128"),
        ({"max_query": 0}, "at least 1"),
        ({"slots": 0}, "at least 1"),
        ({"count": 3}, "4 flags"),
        ({"capacity": 3}, "power of two"),
        ({"ring": 4}, "aligned"),
    ):
        with pytest.raises(ValueError, match=match):
            new(**wrong)
    with pytest.raises(ValueError, match="int32"):
        admit.new_device_admission(admit.new_state(1, 2, 2), torch.zeros(9), 64, 4)

    state, device = admit.new_state(1, 8, 8), new()
    offsets = torch.zeros(9, dtype=torch.int32)
    for arguments in ((1, offsets), (-1, offsets), (0, offsets[1:]), (0, offsets.long()), (0, offsets, -1)):
        with pytest.raises(ValueError):
            admit.admit_layer(state, device, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_on_the_device_equals_the_reference(seed: int) -> None:
    """2,000 random histories on small pools in all."""
    histories.run(seed, 500, "cuda")


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_on_the_device_equals_the_reference_in_large_pools() -> None:
    """Random histories; most of the time goes into compiling, anew for each of their sizes, policies and half-lives."""
    histories.run(0, 24, "cuda", histories.LARGE)


@pytest.mark.gpu
def test_on_the_device_every_routed_row_is_computed_once() -> None:
    admitted_rows.run(0, 60, "cuda")


@pytest.mark.gpu
def test_on_the_device_waits_for_the_reader_of_the_ring() -> None:
    """And gives up, with an error, on one that takes nothing."""
    histories.reader_in_a_thread("cuda")
    histories.ring_stays_full("cuda")
    histories.host_ends_the_spin("cuda")


@pytest.mark.gpu
def test_on_the_device_ages_beyond_2_31() -> None:
    histories.saturated_ages("cuda")


@pytest.mark.gpu
def test_a_captured_launch_replays() -> None:
    histories.graph_replays(50)
