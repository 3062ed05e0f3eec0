"""Error feedback in a kernel: the blocks of a span one after the other. docs/nvfp4.md, section 25.

A program owns a strip of rows of one span. Errors and coefficients are 8-bit integers, which tensor cores
multiply and add exactly. It writes the errors of 64 columns, a group, to memory, where it reads them again
for all later groups; within a group they stay in registers. The reference is reference/error_feedback.py.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.feedback_coefficients import (
    FARTHEST,
    GROUP,
    LARGEST,
    LEAST_EXPONENT,
    UNITS,
    UNITS_BELOW,
)
from fourbits.quant.kernels.rounding_triton import (
    ABS_BITS,
    SIGN_BIT,
    bits_of,
    float_of,
    rounded_to,
    with_sign,
)
from fourbits.quant.kernels.tile_triton import (
    global_scale,
    load_tile,
    prepared_tile,
    rounded_tile,
    tensor_amax,
)

#: elements of a block and of a group; blocks of a group; the largest error, and the largest value it counts;
#: adding and taking away the last number rounds to whole ones
_BLOCK = tl.constexpr(16)
_GROUP = tl.constexpr(GROUP)
_PER_GROUP = tl.constexpr(GROUP // 16)
_LARGEST, _FARTHEST = tl.constexpr(float(LARGEST)), tl.constexpr(FARTHEST)
_WHOLE = tl.constexpr(12582912.0)
#: biased exponents: the least of a row's largest magnitude; from there down to its unit, and to what a whole
#: number of errors times coefficients stands for
_LEAST = tl.constexpr(127 + LEAST_EXPONENT)
_BELOW = tl.constexpr(UNITS_BELOW)
_SHARE_BELOW = tl.constexpr(UNITS_BELOW + UNITS.bit_length() - 1)


@triton.jit
def load_shares(coefficients_ptr, first, column, K, SPAN: tl.constexpr, COUNT: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """What errors in COUNT rows from `first` on add to the columns of the span from `column` on: int8 [COUNT,
    COLUMNS]. A column's coefficients lie together, as tensor cores read 8-bit operands.
    """
    rows = first + tl.arange(0, COUNT)[:, None]
    columns = column + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < K) & (columns < SPAN)
    return tl.load(coefficients_ptr + columns * K + rows, mask=inside, other=0)


@triton.jit
def load_within(coefficients_ptr, first, start, K, SPAN: tl.constexpr):
    """What blocks of a group add to its later ones: fp16 [16, 16] each, by later block, then by earlier."""
    found = ()
    for place in tl.static_range(1, _PER_GROUP):
        for earlier in tl.static_range(place):
            row, column = first + earlier * _BLOCK, start + place * _BLOCK
            shares = load_shares(coefficients_ptr, row, column, K, SPAN, _BLOCK, _BLOCK)
            found = found + (shares.to(tl.float16),)
    return found


@triton.jit
def load_group(x_ptr, x_stride, row, column, M, K, CONFIG: tl.constexpr, ROWS: tl.constexpr,
               HARDWARE: tl.constexpr):  # fmt: skip
    """The values to quantize in the 64 columns from `column` on: fp32 [ROWS, 64]."""
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    x = load_tile(x_ptr, x_stride, row, column, M, K, ROWS, _GROUP, HARDWARE)
    return prepared_tile(x, IS_BF16, x_ptr, 0, None, CONFIG, ROWS, _GROUP, HARDWARE)


@triton.jit
def blocks_of(y, ROWS: tl.constexpr):
    """The four blocks of a group: fp32 [ROWS, 64] as a tuple of [ROWS, 16]."""
    pairs = tl.permute(tl.reshape(y, (ROWS, 2, 2, _BLOCK)), (0, 3, 1, 2))
    evens, odds = tl.split(pairs)
    first, third = tl.split(evens)
    second, fourth = tl.split(odds)
    return first, second, third, fourth


@triton.jit
def row_amax(y):
    """Bit pattern of the largest magnitude of a row, int32 [ROWS]. y: fp32 [ROWS, columns]."""
    return tl.max(bits_of(y) & ABS_BITS, axis=1)


@triton.jit
def row_exponents(x_ptr, x_stride, row, span, M, K, CONFIG: tl.constexpr, SPAN: tl.constexpr,
                  ROWS: tl.constexpr, STAGES: tl.constexpr, HARDWARE: tl.constexpr):  # fmt: skip
    """Biased exponent of a row's largest magnitude in a span, int32 [ROWS], from which its units follow."""
    largest = tl.full((ROWS,), 0, tl.int32)
    for group in tl.range(0, tl.cdiv(SPAN, _GROUP), num_stages=STAGES):
        y = load_group(x_ptr, x_stride, row, span + group * _GROUP, M, K, CONFIG, ROWS, HARDWARE)
        largest = tl.maximum(largest, row_amax(y))
    return tl.maximum(largest >> 23, _LEAST)


@triton.jit
def with_groups(y, count, errors_ptr, height, coefficients_ptr, first, column, K, unit, SPAN: tl.constexpr,
                ROWS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """A group's columns, fp32 [ROWS, 64] from `column` of the span on, plus what `count` earlier groups lost.

    first: the span's first row of the coefficients; unit: of errors times coefficients, fp32 [ROWS].
    """
    within = tl.arange(0, _GROUP)
    columns = column + within[None, :]
    errors_ptrs = errors_ptr + tl.arange(0, ROWS)[:, None] * _GROUP + within[None, :]
    shares_ptrs = coefficients_ptr + columns * K + (first + within)[:, None]
    total = tl.zeros((ROWS, _GROUP), tl.int32)
    for _ in tl.range(0, count, num_stages=STAGES):
        errors = tl.load(errors_ptrs)
        if SPAN % 64 != 0:
            shares = tl.load(shares_ptrs, mask=columns < SPAN, other=0)
        else:
            shares = tl.load(shares_ptrs)
        total = tl.dot(errors, shares, total, out_dtype=tl.int32)
        errors_ptrs += height * _GROUP
        shares_ptrs += _GROUP
    return tl.fma(total.to(tl.float32), unit[:, None], y)


@triton.jit
def joined(first, second, third, fourth, ROWS: tl.constexpr):
    """Inverse of blocks_of: four tensors [ROWS, 16] as [ROWS, 64]."""
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(tl.permute(pairs, (0, 2, 3, 1)), (ROWS, _GROUP))


@triton.jit
def with_blocks(y, errors, within, unit, PLACE: tl.constexpr):
    """Block PLACE of a group, plus what the group's earlier blocks lost: fp32 [ROWS, 16].

    errors: zeros, then those of earlier blocks. The product with zeros gives all blocks, the first too, the
    layout of a product, so that no values move between threads.
    """
    total = tl.dot(errors[0], within[0], out_dtype=tl.float32)
    for earlier in tl.static_range(PLACE):
        total = tl.dot(errors[1 + earlier], within[PLACE * (PLACE - 1) // 2 + earlier], total)
    return tl.fma(total, unit[:, None], y)


@triton.jit
def lost(rounded, scaled, scale, decode, inverse, ROWS: tl.constexpr):
    """What rounding a column of blocks lost, in whole units of its rows, plus 1.5 * 2^23: fp32 [ROWS, 16].

    inverse: of the unit, fp32 [ROWS].
    """
    factor = (scale * decode) * inverse[:, None, None, None]
    factor = tl.where(factor > 0.0, tl.minimum(factor, _LARGEST), 0.0)
    error = (tl.minimum(tl.abs(scaled), _FARTHEST) - rounded) * factor
    error = float_of(bits_of(error) ^ (bits_of(scaled) & SIGN_BIT))
    return tl.reshape(error + _WHOLE, (ROWS, _BLOCK))


@triton.jit
def store_group(out_ptr, out_stride, out_k, M, row, column, values, ROWS: tl.constexpr,
                HARDWARE: tl.constexpr):  # fmt: skip
    """Write a group's values, element * block scale in bf16, from (row, column) on."""
    rows = row + tl.arange(0, ROWS)[:, None]
    columns = column + tl.arange(0, _GROUP)[None, :]
    places = out_ptr + rows.to(tl.int64) * out_stride + columns
    values = rounded_to(values, tl.bfloat16, HARDWARE)
    tl.store(places, values, mask=(rows < M) & (columns < out_k))


@triton.jit
def feedback_kernel(
    x_ptr, x_stride, M, K, coefficients_ptr, out_ptr, out_stride, out_k, amax_ptr, global_ptr, errors_ptr,
    height,
    CONFIG: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The exact row operand of x [M, K], element * block scale, bf16 [M, out_k]; global_ptr: its scale.

    coefficients_ptr: int8 [K, SPAN], column by column; amax_ptr: fp32 [PARTS], whose largest is the tensor's
    amax; errors_ptr: int8 [groups, height, 64], memory of the kernel's own, where height is M rounded up to
    ROWS.
    """
    spans = tl.maximum(tl.cdiv(K, SPAN), 1)
    row, number = (tl.program_id(0) // spans) * ROWS, tl.program_id(0) % spans
    span, above = number * SPAN, (number * tl.cdiv(SPAN, _GROUP)).to(tl.int64) * height + row
    errors_ptr += above * _GROUP
    places = tl.arange(0, ROWS)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    bits = tensor_amax(amax_ptr, global_ptr, CONFIG, PARTS)
    decode = global_scale(bits, CONFIG)
    exponents = row_exponents(x_ptr, x_stride, row, span, M, K, CONFIG, SPAN, ROWS, STAGES, HARDWARE)
    inverse, unit = float_of((254 - (exponents - _BELOW)) << 23), float_of((exponents - _SHARE_BELOW) << 23)
    for group in range(tl.cdiv(SPAN, _GROUP)):
        start = group * _GROUP
        within = load_within(coefficients_ptr, span + start, start, K, SPAN)
        y = load_group(x_ptr, x_stride, row, span + start, M, K, CONFIG, ROWS, HARDWARE)
        y = with_groups(
            y, group, errors_ptr, height, coefficients_ptr, span, start, K, unit, SPAN, ROWS, STAGES
        )  # fmt: skip
        blocks, errors, kept, values = blocks_of(y, ROWS), (tl.zeros((ROWS, _BLOCK), tl.float16),), (), ()
        for place in tl.static_range(_PER_GROUP):
            y = with_blocks(blocks[place], errors, within, unit, place)
            column = span + start + place * _BLOCK
            rounded, scaled, scale = rounded_tile(
                y,
                row_amax(y)[:, None, None, None],
                bits,
                row,
                column,
                amax_ptr,
                0,
                None,
                CONFIG,
                ROWS,
                _BLOCK,
            )
            error = lost(rounded, scaled, scale, decode, inverse, ROWS)
            errors = errors + ((error - _WHOLE).to(tl.float16),)
            kept = kept + (bits_of(error).to(tl.int8),)
            values = values + (tl.reshape(with_sign(rounded * scale, scaled), (ROWS, _BLOCK)),)
        kept_ptr = errors_ptr + tl.full((), height, tl.int64) * start
        tl.store(kept_ptr + places, joined(*kept, ROWS))
        found = joined(*values, ROWS)
        store_group(out_ptr, out_stride, out_k, M, row, span + start, found, ROWS, HARDWARE)
        tl.debug_barrier()
