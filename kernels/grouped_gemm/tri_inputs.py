# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: the experts' activation, and inputs rounded to E2M1 as `kernels.quant.quantised_inputs` rounds them.

Each operation is float32 and rounded to nearest, so that the codes are the reference's. They stay multiplied by their
block's scale, which is exact in bfloat16, for the products of any kernel.
"""

import torch
import triton
import triton.language as tl

_COLUMNS = tl.constexpr(1024)
"""Of a program."""


def quantised(x: torch.Tensor, input_scale: float) -> torch.Tensor:
    """x [T, H] in units of `input_scale`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        grid = (x.shape[0], triton.cdiv(x.shape[1], _COLUMNS.value))
        _quantise[grid](x, out, input_scale, H=x.shape[1], num_warps=4)
    return out


@triton.jit
def activation(gate, up, LIMIT: tl.constexpr):
    """silu(gate) * up, or with a LIMIT above 0 gpt-oss' clamped SwiGLU. What is not a number stays so."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)
    else:
        return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def quantised_rows(values, input_scale):
    """[N, M] in blocks of 16 along N."""
    N: tl.constexpr = values.shape[0]
    M: tl.constexpr = values.shape[1]
    blocks = tl.reshape(values, (N // 16, 16, M))
    largest = tl.max(tl.abs(blocks), 1)
    return tl.reshape(_rounded(blocks, tl.broadcast_to(largest[:, None, :], blocks.shape), input_scale), (N, M))


@triton.jit
def quantised_vector(values, input_scale):
    """[N] in blocks of 16."""
    N: tl.constexpr = values.shape[0]
    blocks = tl.reshape(values, (N // 16, 16))
    largest = tl.max(tl.abs(blocks), 1)
    return tl.reshape(_rounded(blocks, tl.broadcast_to(largest[:, None], blocks.shape), input_scale), (N,))


@triton.jit
def _rounded(values, largest, input_scale):
    """In units of `input_scale`: E2M1 code times E4M3 scale of values whose block's largest magnitude is given."""
    factor = tl.zeros_like(largest) + input_scale
    wanted = tl.div_rn(tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32)), factor)
    scale = _e4m3_nearest(tl.minimum(wanted, 448.0))
    step = scale * factor
    unit = tl.where(step > 0, tl.div_rn(tl.abs(values), tl.where(step > 0, step, 1.0)), 0.0)
    code = tl.where(unit >= 3.5, tl.where(unit > 5, 6.0, 4.0), tl.where(unit > 2.5, 3.0, 2.0))
    code = tl.where(unit >= 1.75, code, tl.where(unit > 1.25, 1.5, 1.0))
    code = tl.where(unit >= 0.75, code, tl.where(unit > 0.25, 0.5, 0.0))
    return tl.where(values != values, values, tl.where(values < 0, -code, code) * scale)


@triton.jit
def _e4m3_nearest(value):
    """0 <= value <= 448 rounded to a number of E4M3, ties to even: to 4 significant bits, from 2^-6 down to 2^-9."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (value + 16384.0) - 16384.0  # whose last place is 2^-9
    return tl.where(value < 0.015625, small, normal)


@triton.jit
def _quantise(x_ptr, out_ptr, input_scale, H: tl.constexpr):
    column = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    place = tl.program_id(0).to(tl.int64) * H + column
    x = tl.load(x_ptr + place, mask=column < H, other=0).to(tl.float32)
    tl.store(out_ptr + place, quantised_vector(x, input_scale).to(out_ptr.dtype.element_ty), mask=column < H)
