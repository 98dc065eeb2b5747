"""A script: the Triton kernels of gated DeltaNet in the interpreter, in float32, against the plain-torch references."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.causal_conv import ref as conv_ref
from kernels.causal_conv import tri as conv_tri
from kernels.gated_delta import ref, tri, tri_step
from kernels.norm import ref as norm_ref
from kernels.norm import tri_gated
from tests.kernels.delta_cases import SPANS, Sizes, gates_of, pieces_of, states_of, tokens_of

SIZES = Sizes(1, 2, 12, 40)
SOURCES = torch.tensor([-1, 3, 5, 7, 2], dtype=torch.int32)
TARGETS = torch.tensor([1, 3, -1, 8, 4], dtype=torch.int32)


def expect_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


for spans in SPANS.values():
    pieces, rows = pieces_of(spans), sum(span.rows for span in spans)
    tokens, gates = tokens_of(rows, SIZES), gates_of(SIZES)
    ours, theirs = states_of(2, 12, 40), states_of(2, 12, 40)
    expect_equal(tri.gated_delta(tokens, gates, ours, pieces), ref.gated_delta(tokens, gates, theirs, pieces))
    expect_equal(ours, theirs)
    for width in (2, 4):
        x, weight = torch.randn(rows, 75)[:, :70], torch.randn(70, width)
        ours, theirs = states_of(width - 1, 70), states_of(width - 1, 70)
        expect_equal(conv_tri.causal_conv(x, weight, ours, pieces), conv_ref.causal_conv(x, weight, theirs, pieces))
        expect_equal(ours, theirs)

tokens, gates = tokens_of(5, SIZES), gates_of(SIZES)
ours, theirs = states_of(2, 12, 40), states_of(2, 12, 40)
expect_equal(
    tri_step.gated_delta_step(tokens, gates, ours, SOURCES, TARGETS),
    ref.gated_delta_step(tokens, gates, theirs, SOURCES, TARGETS),
)
expect_equal(ours, theirs)
for width in (2, 4):
    x, weight = torch.randn(5, 300)[:, 20:290], torch.randn(270, width)
    ours, theirs = states_of(width - 1, 270), states_of(width - 1, 270)
    expect_equal(
        conv_tri.causal_conv_step(x, weight, ours, SOURCES, TARGETS),
        conv_ref.causal_conv_step(x, weight, theirs, SOURCES, TARGETS),
    )
    expect_equal(ours, theirs)

for shape in ((0, 2, 8), (1, 1, 2), (5, 3, 20), (3, 2, 128)):
    x, gate = torch.randn(shape) * 3, torch.randn(shape[0], 2 * shape[1], shape[2])[:, ::2]
    weight = torch.randn(shape[2])
    expect_equal(tri_gated.gated_rms_norm(x, gate, weight, 1e-6), norm_ref.gated_rms_norm(x, gate, weight, 1e-6))
print("ok")
