"""Block scales inside kernels. docs/nvfp4.md, sections 7 and 13; the reference is reference/scales.py.

Maxima are bit patterns of magnitudes, compared as integers: exact in any order, and NaN is not lost.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.rounding_triton import (
    ABS_BITS,
    EXPONENT_BITS,
    FLT_MAX,
    bits_of,
    float_of,
    nearest,
)


@triton.jit
def blocked(x, CONFIG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile as blocks: [ROWS, COLUMNS] -> [ROWS / r, r, COLUMNS / c, c]."""
    DOWN: tl.constexpr = ROWS // CONFIG.block_rows
    ACROSS: tl.constexpr = COLUMNS // CONFIG.block_columns
    return tl.reshape(x, (DOWN, CONFIG.block_rows, ACROSS, CONFIG.block_columns))


@triton.jit
def larger(a, b):
    """The larger magnitude, elementwise; NaN if either is NaN."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def halved_rows(x, TIMES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Largest magnitude of every 2^TIMES consecutive rows. x: fp32 [ROWS, COLUMNS]."""
    for i in tl.static_range(TIMES):
        pairs = tl.reshape(x, (ROWS >> (i + 1), 2, COLUMNS))
        even, odd = tl.split(tl.permute(pairs, (0, 2, 1)))
        x = larger(even, odd)
    return x


@triton.jit
def halved_columns(x, TIMES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Largest magnitude of every 2^TIMES consecutive columns. x: fp32 [ROWS, COLUMNS]."""
    for i in tl.static_range(TIMES):
        even, odd = tl.split(tl.reshape(x, (ROWS, COLUMNS >> (i + 1), 2)))
        x = larger(even, odd)
    return x


@triton.jit
def block_amax(
    y, CONFIG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HELD: tl.constexpr = False
):
    """Bit pattern of the largest magnitude in each block, int32 [R, 1, C, 1]. y: fp32 [ROWS, COLUMNS].

    Elements of one thread are compared as floats, which takes one instruction; others as integers. HELD: one
    thread holds a whole block, or for axis 1 a whole row of a block.
    """
    ABOVE: tl.constexpr = ROWS // CONFIG.block_rows
    ACROSS: tl.constexpr = COLUMNS // CONFIG.block_columns
    if HELD and CONFIG.axis == 1:
        x = halved_columns(y, CONFIG.block_columns.bit_length() - 1, ROWS, COLUMNS)
        rows = tl.reshape(bits_of(x) & ABS_BITS, (ABOVE, CONFIG.block_rows, ACROSS))
        bits = tl.max(rows, axis=1)[:, None, :, None]
    else:
        x = halved_rows(y, CONFIG.block_rows.bit_length() - 1, ROWS, COLUMNS)
        if CONFIG.block_columns == 1 or HELD:
            x = halved_columns(x, CONFIG.block_columns.bit_length() - 1, ABOVE, COLUMNS)
            bits = tl.reshape(bits_of(x) & ABS_BITS, (ABOVE, 1, ACROSS, 1))
        else:
            fours = bits_of(halved_columns(x, 2, ABOVE, COLUMNS)) & ABS_BITS
            bits = tl.max(tl.reshape(fours, (ABOVE, ACROSS, CONFIG.block_columns // 4)), axis=2)
            bits = bits[:, None, :, None]
    return bits


@triton.jit
def encode_scale(amax_bits, TARGET: tl.constexpr):
    """S_enc of the whole tensor: min(TARGET / amax, FMAX), 1 where amax is zero or not finite."""
    usable = (amax_bits > 0) & (amax_bits < EXPONENT_BITS)
    amax = float_of(tl.where(usable, amax_bits, 0x3F800000))
    quotient = tl.minimum(tl.div_rn(tl.full(amax.shape, TARGET, tl.float32), amax), FLT_MAX)
    return tl.where(usable, quotient, 1.0)


@triton.jit
def max_target(amax_bits, tensor_bits, CONFIG: tl.constexpr):
    """The block scale that maps a block's maximum to the largest element, before rounding. fp32."""
    s_enc = tl.full((), 1.0, tl.float32)
    if CONFIG.target != 0.0:
        s_enc = encode_scale(tensor_bits, CONFIG.target)
    return float_of(amax_bits) * (s_enc * CONFIG.kappa)


@triton.jit
def two_level(ideal, amax_bits, tensor_bits, CONFIG: tl.constexpr):
    """(block scale, multiplier of the elements) on a grid, under the tensor's scale where it has one.

    ideal: the unrounded block scales, fp32.
    """
    SCALE: tl.constexpr = CONFIG.scale
    s_enc = tl.full((), 1.0, tl.float32)
    if CONFIG.target != 0.0:
        s_enc = encode_scale(tensor_bits, CONFIG.target)
    s_dec = tl.div_rn(tl.full((), 1.0, tl.float32), s_enc)
    scale = nearest(ideal, SCALE)
    divisor = scale * s_dec
    encode = tl.minimum(tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor), FLT_MAX)
    bad = (amax_bits >= EXPONENT_BITS) | (tensor_bits >= EXPONENT_BITS)
    # where the divisor overflows, infinity times 0 would be a NaN, without infinity's sign
    return tl.where(bad, float("nan"), scale), tl.where(bad, 1.0, encode)


@triton.jit
def power_of_two(amax_bits, CONFIG: tl.constexpr):
    """Like `scales_on_grid`, for E8M0: a power of two from 2^-127 on, by the exponent of the maximum."""
    doubled = (amax_bits & 0x7FFFFF) > CONFIG.largest_fraction
    code = tl.maximum((amax_bits >> 23) - CONFIG.emax_exponent + doubled.to(tl.int32), 0)
    scale = tl.where(code == 0, 0x400000, code << 23)
    bad = amax_bits >= EXPONENT_BITS
    # a NaN's code may be 254, and infinity times 0 would lose its sign
    return float_of(tl.where(bad, 0x7FC00000, scale)), float_of((254 - tl.minimum(code, 253)) << 23)
