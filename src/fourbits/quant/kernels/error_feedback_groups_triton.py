"""Error feedback over long spans in a kernel: group after group of 64 columns. docs/nvfp4.md, section 25.

A program owns a strip of rows of one span, and writes what each group lost to memory, where it reads it again
for all later groups: 8-bit integers, which tensor cores multiply by coefficients as they are. Within a group
it works as error_feedback_triton.py does.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.feedback_coefficients import GROUP
from fourbits.quant.kernels.error_feedback_triton import lost, store_values, whole
from fourbits.quant.kernels.rounding_triton import ABS_BITS, bits_of
from fourbits.quant.kernels.tile_triton import (
    global_scale,
    load_tile,
    prepared_tile,
    rounded_tile,
    tensor_amax,
)

_BLOCK = tl.constexpr(16)
_GROUP = tl.constexpr(GROUP)
_PER_GROUP = tl.constexpr(GROUP // 16)


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
def blocks_of(y, ROWS: tl.constexpr):
    """The four blocks of a group: fp32 [ROWS, 64] as a tuple of [ROWS, 16]."""
    pairs = tl.permute(tl.reshape(y, (ROWS, 2, 2, _BLOCK)), (0, 3, 1, 2))
    evens, odds = tl.split(pairs)
    first, third = tl.split(evens)
    second, fourth = tl.split(odds)
    return first, second, third, fourth


@triton.jit
def row_amax(y):
    """Bit pattern of the largest magnitude of a row, int32 [ROWS, 1, 1, 1]. y: fp32 [ROWS, 16]."""
    return tl.max(bits_of(y) & ABS_BITS, axis=1)[:, None, None, None]


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
def with_blocks(y, errors, steps, within, PLACE: tl.constexpr):
    """Block PLACE of a group, plus what the group's earlier blocks lost: fp32 [ROWS, 16]."""
    for earlier in tl.static_range(PLACE):
        shares = within[PLACE * (PLACE - 1) // 2 + earlier]
        y += tl.dot(errors[earlier], shares, out_dtype=tl.float32) * steps[earlier]
    return y


@triton.jit
def keep_group(errors, steps, errors_ptr, steps_ptr, height, group, ROWS: tl.constexpr):
    """Write what a group lost, in the largest of its blocks' units: int8 [ROWS, 64], fp32 [ROWS]."""
    rows = tl.arange(0, ROWS)[:, None]
    above = tl.full((), height, tl.int64) * group
    errors_ptr, steps_ptr = errors_ptr + above * _GROUP, steps_ptr + above
    largest = steps[0]
    for place in tl.static_range(1, _PER_GROUP):
        largest = tl.maximum(largest, steps[place])
    divisor = tl.where(largest > 0.0, largest, 1.0)
    column = tl.arange(0, _BLOCK)[None, :]
    for place in tl.static_range(_PER_GROUP):
        shared = whole(errors[place].to(tl.float32) * tl.div_rn(steps[place], divisor))
        tl.store(errors_ptr + rows * _GROUP + column + place * _BLOCK, shared.to(tl.int8))
    tl.store(steps_ptr + rows, largest)


@triton.jit
def with_groups(y, count, errors_ptr, steps_ptr, height, coefficients_ptr, first, column, K,
                SPAN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """A group's columns, fp32 [ROWS, 64] from `column` of the span on, plus what `count` earlier groups lost.

    first: the span's first row of the coefficients.
    """
    rows = tl.arange(0, ROWS)[:, None]
    places = rows * _GROUP + tl.arange(0, _GROUP)[None, :]
    for group in tl.range(0, count, num_stages=STAGES):
        errors = tl.load(errors_ptr + places)
        step = tl.load(steps_ptr + rows)
        shares = load_shares(coefficients_ptr, first + group * _GROUP, column, K, SPAN, _GROUP, _GROUP)
        y += tl.dot(errors, shares, out_dtype=tl.int32).to(tl.float32) * step
        errors_ptr += height * _GROUP
        steps_ptr += height
    return y


@triton.jit
def feedback_groups_kernel(
    x_ptr, x_stride, M, K, coefficients_ptr, out_ptr, out_stride, out_k, amax_ptr, global_ptr,
    errors_ptr, steps_ptr, height,
    CONFIG: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """As `feedback_kernel`, for spans of more than a group; the coefficients lie column by column.

    errors_ptr: int8 [groups, height, 64] and steps_ptr: fp32 [groups, height], which it uses as memory of its
    own; height is M rounded up to ROWS.
    """
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    spans = tl.maximum(tl.cdiv(K, SPAN), 1)
    row, number = (tl.program_id(0) // spans) * ROWS, tl.program_id(0) % spans
    span, above = number * SPAN, (number * tl.cdiv(SPAN, _GROUP)).to(tl.int64) * height + row
    errors_ptr, steps_ptr = errors_ptr + above * _GROUP, steps_ptr + above
    bits = tensor_amax(amax_ptr, global_ptr, CONFIG, PARTS)
    decode = global_scale(bits, CONFIG)
    for group in range(tl.cdiv(SPAN, _GROUP)):
        start = group * _GROUP
        within = load_within(coefficients_ptr, span + start, start, K, SPAN)
        x = load_tile(x_ptr, x_stride, row, span + start, M, K, ROWS, _GROUP, HARDWARE)
        y = prepared_tile(x, IS_BF16, x_ptr, 0, None, CONFIG, ROWS, _GROUP, HARDWARE)
        y = with_groups(
            y, group, errors_ptr, steps_ptr, height, coefficients_ptr, span, start, K, SPAN, ROWS, STAGES
        )  # fmt: skip
        blocks, errors, steps = blocks_of(y, ROWS), (), ()
        for place in tl.static_range(_PER_GROUP):
            y = with_blocks(blocks[place], errors, steps, within, place)
            column = span + start + place * _BLOCK
            rounded, scaled, scale = rounded_tile(
                y, row_amax(y), bits, row, column, amax_ptr, 0, None, CONFIG, ROWS, _BLOCK
            )
            error, step = lost(rounded, scaled, scale, decode, ROWS)
            errors, steps = errors + (error,), steps + (step,)
            store_values(out_ptr, out_stride, out_k, M, row, column, rounded, scaled, scale, ROWS, HARDWARE)
        keep_group(errors, steps, errors_ptr, steps_ptr, height, group, ROWS)
        tl.debug_barrier()
