"""rms_norm against float64; the Triton kernel against that and the reference, interpreted and on a device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.norm import gated_rms_norm, rms_norm

ROOT = Path(__file__).parents[2]

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """What rms_norm gives, which is near float64's."""
    out = rms_norm(x, weight, eps)
    wide = x.double()
    expected = weight.double() * wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + eps)
    assert out.dtype == x.dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[x.dtype], rtol=TOLERANCE[x.dtype])
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 127), (5, 128), (2, 3, 129)])
def test_values_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x = (torch.randn(shape, generator=generator) * 30).to(dtype)
    check(x, torch.randn(shape[-1], generator=generator).to(dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_weights_around_zero_and_gates(dtype: torch.dtype) -> None:
    """Against the formulas in float64; a zero-centred weight is added to 1 before anything is rounded."""
    generator = torch.Generator().manual_seed(3)
    x, gate = torch.randn(2, 5, 3, 40, generator=generator).to(dtype)
    weight = (torch.randn(40, generator=generator) / 16).to(dtype)
    wide = x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-6)
    centred = rms_norm(x, weight, 1e-6, zero_centred=True)
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(centred.double(), wide * (1.0 + weight.double()), atol=bound, rtol=bound)
    gated = gated_rms_norm(x, gate, weight, 1e-6)
    expected = wide * weight.double() * gate.double() * torch.sigmoid(gate.double())
    assert gated.dtype == centred.dtype == dtype
    torch.testing.assert_close(gated.double(), expected, atol=bound, rtol=bound)


def test_squares_beyond_the_narrow_type_do_not_overflow() -> None:
    """Against the exact answer: all entries 60000, whose square no float16 holds."""
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones(1, 8, dtype=torch.float16))


def test_a_row_of_zeros_stays_zero() -> None:
    """Against the formula: eps keeps it from dividing by zero."""
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("weight", [torch.ones(7), torch.ones(1, 8)])
def test_a_weight_that_does_not_fit_is_refused(weight: torch.Tensor) -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match="weight"):
        rms_norm(torch.zeros(2, 8), weight, 1e-6)


def test_the_triton_kernel_in_the_interpreter() -> None:
    """Against the reference, on rows that lie together and on views."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.kernels.interpreted_norm"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("width", [1, 64, 128, 2560, 16384])
def test_the_triton_kernel_compiles_for_hopper(width: int) -> None:
    """Against the shared memory and registers of sm_90."""
    pytest.importorskip("triton")
    from kernels.norm import tri
    from tests.kernels.compiled_for import expect_fits

    types = {"rows": "i32", "inner": "i32", "outer_stride": "i32", "inner_stride": "i32", "eps": "fp32"}
    for dtype in ("*bf16", "*fp32"):
        pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), dtype)
        expect_fits(tri._rms_norm, types | pointers, tri.launch_arguments(width))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape",
    [(0, 4), (1, 1), (5,), (1, 2560), (3, 127), (5, 128), (2, 3, 129), (17, 1024), (9, 1025), (1324, 2560), (2, 16384)],
)
def test_the_device_s_values_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x = (torch.randn(shape, generator=generator) * 30).to(dtype).cuda()
    weight = torch.randn(shape[-1], generator=generator).to(dtype).cuda()
    out = check(x, weight)
    if x.ndim > 1 and len(x):
        assert torch.equal(rms_norm(x[:1], weight, 1e-6), out[:1])  # a row has the same bits alone


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_device_reads_views_where_they_are(dtype: torch.dtype) -> None:
    """Against float64: heads of a qkv product, columns from the middle, a transposed tensor."""
    wide = torch.randn(33, 28, 256, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    for view in (wide[:, :24], wide[:, 24:26], wide[:, 3:4, 1:130], wide.transpose(1, 2), wide[None, ::2, 5:9]):
        check(view, torch.linspace(-2, 2, view.shape[-1], device="cuda").to(dtype))


@pytest.mark.gpu
def test_the_device_s_limits() -> None:
    """Against the exact answer beyond float16's squares, and the docstring's widest row."""
    x = torch.full((1, 8), 60000.0, dtype=torch.float16, device="cuda")
    assert torch.equal(rms_norm(x, torch.ones_like(x[0]), 1e-6), torch.ones_like(x))
    with pytest.raises(ValueError, match="16384"):
        rms_norm(torch.zeros(1, 16385, device="cuda"), torch.zeros(16385, device="cuda"), 1e-6)
