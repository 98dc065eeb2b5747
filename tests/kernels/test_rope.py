"""norm_rope against rotation in the complex plane, in complex128, and rms_norm; the Triton kernel against the same."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.norm import rms_norm
from kernels.rope import norm_rope

ROOT = Path(__file__).parents[2]

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [(0, 2, 1, 4), (1, 1, 1, 2), (3, 5, 2, 6), (129, 2, 2, 128), (33, 24, 2, 256), (7, 4, 4, 96), (64, 16, 2, 64)]
"""T, heads, kv_heads, D."""


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] float64: pair i of token t by angles[t, i]."""
    pairs = torch.complex(*x.double().chunk(2, dim=-1))
    out = pairs * torch.polar(torch.ones_like(angles).double(), angles.double())[:, None]
    return torch.cat((out.real, out.imag), dim=-1)


class Case:
    """Views of a qkv product, weights and tables of angles."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(tokens)
        qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype).to(device)
        self.q, self.k, _ = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        weights = torch.rand(2, head_dim, generator=generator) + 0.5
        self.q_weight, self.k_weight = weights.to(dtype).to(device)
        self.angles = (torch.rand(tokens, head_dim // 2, generator=generator) * 100).to(device)

    def check(self, with_q: bool, with_k: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """What norm_rope gives, which is near float64's."""
        weights = (self.q_weight if with_q else None, self.k_weight if with_k else None)
        outs = norm_rope(self.q, self.k, *weights, 1e-6, self.angles.cos(), self.angles.sin())
        for out, x, weight in zip(outs, (self.q, self.k), weights, strict=True):
            wide = x.double()
            if weight is not None:
                wide = weight.double() * wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-6)
            assert out.dtype == x.dtype and out.shape == x.shape and out.is_contiguous()
            tolerance = 2 * TOLERANCE[x.dtype]  # one rounding for the norm, one for the rotation
            torch.testing.assert_close(out.double(), turned(wide, self.angles), atol=tolerance, rtol=tolerance)
        return outs


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_normalised_then_rotated(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Against float64, and against rms_norm first and the rotation alone after it."""
    case = Case(*shape, dtype, "cpu")
    outs = case.check(True, True)
    case.check(False, False)
    case.check(True, False)
    q, k = rms_norm(case.q, case.q_weight, 1e-6), rms_norm(case.k, case.k_weight, 1e-6)
    for ours, theirs in zip(outs, norm_rope(q, k, None, None, 1e-6, case.angles.cos(), case.angles.sin()), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("x", "cos", "dtype"),
    [
        ((3, 2, 8), (3, 5), torch.float32),
        ((3, 2, 8), (2, 4), torch.float32),
        ((3, 2, 7), (3, 3), torch.float32),
        ((3, 2, 8), (3, 4), torch.bfloat16),
    ],
)
def test_tables_that_do_not_fit_are_refused(x: tuple[int, ...], cos: tuple[int, ...], dtype: torch.dtype) -> None:
    """Against the docstring."""
    table = torch.zeros(cos, dtype=dtype)
    for q, k in ((torch.zeros(x), torch.zeros(3, 2, 8)), (torch.zeros(3, 2, 8), torch.zeros(x))):
        with pytest.raises(ValueError, match="cos"):
            norm_rope(q, k, None, None, 1e-6, table, table)


def test_q_k_and_weights_that_do_not_fit_are_refused() -> None:
    """Against the docstring."""
    x, table = torch.zeros(3, 2, 8), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="one type"):
        norm_rope(x, x.to(torch.bfloat16), None, None, 1e-6, table, table)
    for weight in (torch.ones(4), torch.ones(8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="weight"):
            norm_rope(x, x, None, weight, 1e-6, table, table)


def test_the_triton_kernel_in_the_interpreter() -> None:
    """Against the reference, on views and with one, two or no weights."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_rope"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize(("head_dim", "half"), [(2, 1), (64, 32), (96, 48), (128, 64), (256, 128), (256, 32)])
@pytest.mark.parametrize("norm", [True, False])
def test_the_triton_kernel_compiles_for_hopper(head_dim: int, half: int, norm: bool) -> None:
    """Against the shared memory and registers of sm_90."""
    pytest.importorskip("triton")
    from kernels.rope import tri
    from tests.kernels.compiled_for import expect_fits

    types = dict.fromkeys(("q_stride", "q_head_stride", "k_stride", "k_head_stride"), "i32") | {"eps": "fp32"}
    types |= dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    for dtype in ("*bf16", "*fp32"):
        pointers = ("q_ptr", "k_ptr", "q_weight_ptr", "k_weight_ptr", "q_out_ptr", "k_out_ptr")
        arguments = tri.launch_arguments(24, 2, head_dim, norm, norm, half, 2 * half < head_dim)
        expect_fits(tri._norm_rope, types | dict.fromkeys(pointers, dtype), arguments)


ON_DEVICE = [(torch.bfloat16, shape) for shape in [*SHAPES, (1, 24, 2, 256), (1324, 24, 2, 256), (3, 1, 8, 128)]]
ON_DEVICE += [(torch.float16, SHAPES[4]), (torch.float32, SHAPES[4]), (torch.float32, SHAPES[5])]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "shape"), ON_DEVICE)
def test_the_device_s_heads_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    case = Case(*shape, dtype, "cuda")
    case.check(False, False)
    case.check(False, True)
    outs = case.check(True, True)
    for whole, alone in zip(outs, one_token(case), strict=True):
        assert torch.equal(whole[:1], alone)


def one_token(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """norm_rope of the first token alone."""
    q, k, angles = case.q[:1], case.k[:1], case.angles[:1]
    return norm_rope(q, k, case.q_weight, case.k_weight, 1e-6, angles.cos(), angles.sin())
