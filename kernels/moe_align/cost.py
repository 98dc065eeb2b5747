"""Why alignment is our own kernel's even where sgl_kernel is installed.

The routes of an expert must come in one order, whatever the device's threads do first: a row's place in its block is
part of what its bits may depend on, and a run must be repeatable. sgl_kernel gives each expert its routes in the order
of an atomic counter, so that it takes a sort of all routes behind it, which is what our kernel does in the first place;
it takes 1,023 experts at most; and it does not give the table of row blocks that the grouped GEMM reads, which ours
makes in the same launch. So it is a choice that a caller makes (`backend="sgl_kernel"`), never one that is made for it.

The times of both, in order and not, are rows of tests/bench/bench_kernels.py, printed where sgl_kernel can be imported;
kept results are in tests/bench/results.
"""

from typing import Literal

Backend = Literal["triton", "sgl_kernel"]

DEFAULT: Backend = "triton"
