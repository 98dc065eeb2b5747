# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton: codes and scales of quantised weights to values that a matrix instruction takes.

E2M1: a nibble's bits put into the lowest exponent bits of a bfloat16 are its value times 2^-126 (subnormal for 0.5).
NVFP4's scale * 2^118 brings it back up to 2^-8, exactly: code * scale has 6 significant bits. What is left, global *
2^8, multiplies the float32 sum. MXFP4's scales are powers of two from 2^-127 on, so that 2^126 comes first.

E4M3: a code's bits put below the highest exponent bits of a bfloat16 are its value times 2^-120, exactly too.

With BITS false all is in float32, which the interpreter can.
"""

import triton
import triton.language as tl

_E2M1 = tl.constexpr("""
{
.reg .b32 t, s, g;
prmt.b32 t, $4, 0, 0x4140;
shl.b32 s, t, 6;   and.b32 s, s, 0x01C001C0;
shl.b32 g, t, 12;  and.b32 g, g, 0x80008000;
or.b32 $0, s, g;
shl.b32 s, t, 2;   and.b32 s, s, 0x01C001C0;
shl.b32 g, t, 8;   and.b32 g, g, 0x80008000;
or.b32 $2, s, g;
prmt.b32 t, $4, 0, 0x4342;
shl.b32 s, t, 6;   and.b32 s, s, 0x01C001C0;
shl.b32 g, t, 12;  and.b32 g, g, 0x80008000;
or.b32 $1, s, g;
shl.b32 s, t, 2;   and.b32 s, s, 0x01C001C0;
shl.b32 g, t, 8;   and.b32 g, g, 0x80008000;
or.b32 $3, s, g;
}
""")
"""Four bytes to their low nibbles ($0, $1) and high nibbles ($2, $3), pairs of bfloat16: value * 2^-126."""

_E4M3 = tl.constexpr("""
{
.reg .b32 t, s, g;
prmt.b32 t, $2, 0, 0x4140;
shl.b32 s, t, 4;   and.b32 s, s, 0x07F007F0;
shl.b32 g, t, 8;   and.b32 g, g, 0x80008000;
or.b32 $0, s, g;
prmt.b32 t, $2, 0, 0x4342;
shl.b32 s, t, 4;   and.b32 s, s, 0x07F007F0;
shl.b32 g, t, 8;   and.b32 g, g, 0x80008000;
or.b32 $1, s, g;
}
""")
"""Four bytes to pairs of bfloat16: value * 2^-120."""

_UP = tl.constexpr(2.0**118)
_E2M1_UP = tl.constexpr(2.0**126)
_E4M3_UP = tl.constexpr(2.0**120)

BACK = tl.constexpr(2.0**8)
"""What the sums over `e2m1_scaled` under NVFP4's scales are to be multiplied by, with BITS."""

NVFP4_GROUP = tl.constexpr(8)
"""Bytes of codes under one scale."""


@triton.jit
def e2m1_scaled(codes, scales, GROUP: tl.constexpr, FP8_TYPE: tl.constexpr, BITS: tl.constexpr):
    """[N, G * GROUP] bytes under [N, G] scales, E4M3 for NVFP4_GROUP or else E8M0: the even and the odd k's values."""
    N: tl.constexpr = codes.shape[0]
    G: tl.constexpr = scales.shape[1]
    if GROUP == NVFP4_GROUP:
        wide = e4m3_scales(scales, FP8_TYPE)
        if BITS:
            wide = (wide * _UP).to(tl.bfloat16)
    elif BITS:
        wide = tl.where(scales == 0, 0x40, scales.to(tl.int16) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        wide = e8m0(scales)
    wide = tl.reshape(tl.broadcast_to(wide[:, :, None], (N, G, GROUP)), (N, G * GROUP))
    even, odd = _e2m1(codes, BITS)
    if BITS and GROUP != NVFP4_GROUP:
        even *= _E2M1_UP
        odd *= _E2M1_UP
    return even * wide, odd * wide


@triton.jit
def e4m3_scales(scales, FP8_TYPE: tl.constexpr):
    """Bytes to float32, where FP8_TYPE by an instruction for it, which GPUs before sm_89 lack."""
    if FP8_TYPE:
        return scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return e4m3(scales)


@triton.jit
def e8m0(scales):
    """Bytes to float32: 2^(scale - 127)."""
    return tl.where(scales == 0, 0x400000, scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(codes):
    """Bytes that are numbers to float32."""
    wide = codes.to(tl.int32)
    return (((wide & 0x7F) << 20) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True) * _E4M3_UP


@triton.jit
def _e2m1(codes, BITS: tl.constexpr):
    """Low and high nibbles' values: times 2^-126 as bfloat16, or as they are in float32."""
    if BITS:
        return tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return _value(codes & 0xF), _value(codes >> 4)


@triton.jit
def _value(code):
    low = (code & 1).to(tl.float32)
    exponent = (code >> 1) & 3
    magnitude = tl.where(exponent == 0, 0.5 * low, (0.5 + 0.25 * low) * (1 << exponent.to(tl.int32)).to(tl.float32))
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def fp8_add(
    sums,  # [N, M] float32
    codes_ptr,  # [N, 1]: where the rows of codes start
    scales_ptr,  # [N]: where their scales start
    x,  # [BLOCK_K, M]
    start,
    SIZE: tl.constexpr,  # of a row
    SCALE_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
):
    """`sums` + W x for BLOCK_K columns of W from `start` on, a scale for each SCALE_K; one for all comes at the end.

    Scales multiply the products of a step where that lies under one of them, or else the codes, which are then rounded
    to the type of x.
    """
    kk = tl.arange(0, BLOCK_K)
    inside = (kk < SIZE - start)[None, :]
    codes = tl.load(codes_ptr + start + kk[None, :], mask=inside, other=0)
    if BITS:
        values = tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        values *= _E4M3_UP
    else:
        values = e4m3(codes)
    if SCALE_K >= SIZE:
        return tl.dot(values, x, sums, input_precision="ieee")
    elif SCALE_K % BLOCK_K == 0:
        return sums + tl.dot(values, x, input_precision="ieee") * tl.load(scales_ptr + start // SCALE_K)[:, None]
    else:
        scales = tl.load(scales_ptr[:, None] + ((start + kk) // SCALE_K)[None, :], mask=inside, other=0)
        return tl.dot((values.to(tl.float32) * scales).to(x.dtype), x, sums, input_precision="ieee")


@triton.jit
def fp8_end(sums, scales_ptr, SIZE: tl.constexpr, SCALE_K: tl.constexpr):
    """`sums` of `fp8_add` under the scales that are one for all columns."""
    if SCALE_K >= SIZE:
        return sums * tl.load(scales_ptr)[:, None]
    else:
        return sums
