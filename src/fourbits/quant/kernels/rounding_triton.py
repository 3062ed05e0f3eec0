"""Rounding inside kernels: onto a float grid, to nearest even or stochastically, and to BF16.

A grid with t mantissa bits is uniform within a binade, so adding and then subtracting 1.5 * 2^23 grid steps
rounds to nearest even, because fp32 addition does. Stochastic rounding adds the noise below the last bit that
is kept and truncates. Casts to narrow types are avoided, because the interpreter computes them wrongly.
docs/nvfp4.md, sections 4 and 10. Launch with enable_fp_fusion=False.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

SIGN_BIT = tl.constexpr(-0x80000000)
ABS_BITS = tl.constexpr(0x7FFFFFFF)
EXPONENT_BITS = tl.constexpr(0x7F800000)
FLT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def bits_of(x):
    """Bit pattern of fp32 values, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Inverse of bits_of."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """Bit pattern of fp32 values rounded to bfloat16, int32 with 16 zero bits below; NaN becomes quiet."""
    bits = bits_of(x)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000
    return tl.where((bits & ABS_BITS) > EXPONENT_BITS, 0x7FC00000, rounded)


@triton.jit
def as_bf16(x, HARDWARE: tl.constexpr):
    """fp32 rounded to bfloat16. HARDWARE: use the conversion instruction; the interpreter's truncates."""
    if HARDWARE:
        result = x.to(tl.bfloat16)
    else:
        result = (bf16_bits(x) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return result


@triton.jit
def rounded_to(x, TYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 rounded to fp32, bf16 or fp16."""
    if tl.bfloat16 == TYPE:
        result = as_bf16(x, HARDWARE)
    else:
        result = x.to(TYPE)
    return result


@triton.jit
def to_bf16(x, HARDWARE: tl.constexpr, WIDE: tl.constexpr = False):
    """fp32 rounded to bfloat16 and back. HARDWARE: convert in pairs, which the compiler does not do.

    WIDE: the assembly returns fp32 instead of bfloat16, which takes more registers. Otherwise the compiler
    may move the small bfloat16 elements to other threads before it widens them, and compute everything after
    that twice.
    """
    if HARDWARE and WIDE:
        result = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; "
            "and.b32 $1, pair, 0xFFFF0000; }",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    elif HARDWARE:
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
        result = pairs.to(tl.float32)
    else:
        result = float_of(bf16_bits(x))
    return result


@triton.jit
def as_fp32(x, HARDWARE: tl.constexpr):
    """fp32 values of fp32, bf16 or fp16. HARDWARE: use the conversion; the interpreter's loses subnormals."""
    if HARDWARE or x.dtype != tl.bfloat16:
        result = x.to(tl.float32)
    else:
        result = float_of(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return result


@triton.jit
def shifter(magnitude, GRID: tl.constexpr):
    """1.5 * 2^23 grid steps at each magnitude, fp32, which nearest rounding adds and subtracts."""
    UP: tl.constexpr = ((23 - GRID.mantissa_bits) << 23) + 0x400000
    LEAST: tl.constexpr = ((127 + GRID.min_exponent) << 23) + UP
    return float_of(tl.maximum((bits_of(magnitude) & EXPONENT_BITS) + UP, LEAST))


@triton.jit
def nearest(values, GRID: tl.constexpr):
    """Magnitudes of values rounded to nearest even on the grid, saturating. fp32 -> fp32, without sign."""
    magnitude = tl.minimum(tl.abs(values), GRID.max_value)
    shift = shifter(magnitude, GRID)
    return (magnitude + shift) - shift


@triton.jit
def stochastic(values, noise, GRID: tl.constexpr):
    """Magnitudes of values rounded up where noise + floor(256 f) >= 256. noise: uint32 below 256.

    Subnormals are lifted into the first normal binade, so that the grid's last bit is the same mantissa bit.
    Bits below the 11th of the mantissa are truncated first: 8-bit rounding ignores them, and without them
    the lift is exact.
    """
    LEAST: tl.constexpr = 2.0**GRID.min_exponent
    magnitude = tl.minimum(tl.abs(values), GRID.max_value)
    base = tl.where(magnitude < LEAST, LEAST, 0.0)
    lifted = float_of(bits_of(magnitude) & -0x1000) + base
    carried = bits_of(lifted) + (noise << (15 - GRID.mantissa_bits)).to(tl.int32)
    return float_of(carried & -(1 << (23 - GRID.mantissa_bits))) - base


@triton.jit
def stochastic_24(values, noise, GRID: tl.constexpr):
    """Magnitudes of values rounded up where (noise >> 8) * 2^-24 < f. noise: uint32 words."""
    LEAST: tl.constexpr = (127 + GRID.min_exponent) << 23
    magnitude = tl.minimum(tl.abs(values), GRID.max_value)
    binade = tl.maximum(bits_of(magnitude) & EXPONENT_BITS, LEAST)
    step = float_of(binade - (GRID.mantissa_bits << 23))
    steps = magnitude * float_of((254 << 23) - binade + (GRID.mantissa_bits << 23))
    low = tl.floor(steps)
    uniform = (noise >> 8).to(tl.float32) * (2.0**-24)
    return (low + tl.where(uniform < steps - low, 1.0, 0.0)) * step


@triton.jit
def code_of(magnitude, GRID: tl.constexpr):
    """Codes of magnitudes that lie on the grid, int32, without sign.

    Scaled so that the grid's smallest normal is FP32's, magnitudes have FP32's bits for exponent and
    mantissa, and the grid's subnormals are FP32 subnormals.
    """
    TO_LEAST: tl.constexpr = 2.0 ** (-126 - GRID.min_exponent)
    return bits_of(magnitude * TO_LEAST) >> (23 - GRID.mantissa_bits)


@triton.jit
def magnitude_of(code, GRID: tl.constexpr):
    """Inverse of code_of, fp32."""
    FROM_LEAST: tl.constexpr = 2.0 ** (126 + GRID.min_exponent)
    return float_of(code << (23 - GRID.mantissa_bits)) * FROM_LEAST


@triton.jit
def with_sign(magnitude, values):
    """magnitude with the sign bit of values, which zeros keep."""
    return float_of(bits_of(magnitude) | (bits_of(values) & SIGN_BIT))
