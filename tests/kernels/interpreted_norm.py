"""A script: rms_norm's Triton kernel in the interpreter, in float32, against the plain-torch reference."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.norm import ref, tri

SHAPES = [(0, 4), (1, 1), (5,), (3, 127), (9, 128), (2, 3, 129), (2, 2, 2, 40), (17, 64), (2, 1025)]

for shape in SHAPES:
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * 30
    weight = torch.randn(shape[-1], generator=generator)
    for zero_centred in (False, True):
        ours, theirs = (rms_norm(x, weight, 1e-6, zero_centred) for rms_norm in (tri.rms_norm, ref.rms_norm))
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)

wide = torch.randn(5, 7, 96, generator=torch.Generator().manual_seed(1))
for view in (wide[:, 2:5], wide[:, :, 1:40], wide.transpose(1, 2), wide[::2, 1::2], wide[None, :, 2:5]):
    weight = torch.linspace(-2, 2, view.shape[-1])
    torch.testing.assert_close(tri.rms_norm(view, weight, 1e-5), ref.rms_norm(view, weight, 1e-5), atol=1e-6, rtol=1e-6)
print("ok")
