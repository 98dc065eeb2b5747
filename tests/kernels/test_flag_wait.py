"""The spinning kernel against the order of events: it ends after the flag is set, and not before."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kernels.flag_wait import spin_until_set

ROOT = Path(__file__).parents[2]


def test_in_the_interpreter() -> None:
    """A thread sets the flag; flags that are set already hold nobody up."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_flag_wait"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


def test_compiles_for_sm_90() -> None:
    """One warp, in whose loop the word is loaded with an acquire of the system's scope."""
    pytest.importorskip("triton")
    from kernels.flag_wait import tri
    from tests.kernels.compiled_for import compile_for

    compiled = compile_for(90, tri.spin_kernel, {"flags": "*i32", "index": "i32"}, {"PTX": True, "num_warps": 1})
    assert compiled.asm["ptx"].count("ld.acquire.sys.global.b32") == 1 and ".reqntid 32" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    "flags", [torch.zeros(3), torch.zeros(1, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)]
)
def test_other_flags_are_refused(flags: torch.Tensor) -> None:
    """Against the docstring; the last ones are on the host."""
    with pytest.raises(ValueError, match="flags must be"):
        spin_until_set(flags, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_the_stream_waits_for_the_flag(captured: bool) -> None:
    """A stream that waits copies nothing; once another stream has set the flag it does. Twice, as a replay would."""
    flags = torch.zeros(4, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="flag 4 of 4"):
        spin_until_set(flags, 4)
    flags[0] = 1
    spin_until_set(flags, 0)  # compiled; set already
    behind, value = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    waiting, other = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]

    def wait_and_copy() -> None:
        spin_until_set(flags, 2)
        behind.copy_(value)

    behind.copy_(value)  # all that is needed is loaded before anything waits
    flags[2:3].fill_(1)
    behind.item()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            wait_and_copy()
    torch.cuda.synchronize()
    for number in (1, 2):
        flags[2] = 0
        value.fill_(number)
        torch.cuda.synchronize()
        with torch.cuda.stream(waiting):
            if captured:
                graph.replay()
            else:
                wait_and_copy()
        time.sleep(0.1)
        assert not waiting.query()
        with torch.cuda.stream(other):
            assert behind.item() == number - 1
            flags[2:3].fill_(number)
        waiting.synchronize()
        assert behind.item() == number
