"""Error feedback over long spans in a kernel: group after group of 64 columns. docs/nvfp4.md, section 25.

A program owns a strip of rows of one span, and writes what each group lost to memory, where it reads it again
for all later groups. Within a group it works as error_feedback_triton.py does.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.feedback_coefficients import GROUP
from fourbits.quant.kernels.error_feedback_triton import load_coefficients, lost, store_values, whole
from fourbits.quant.kernels.scaling_triton import block_amax
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
def prepared_blocks(x_ptr, x_stride, row, column, M, K, CONFIG: tl.constexpr, ROWS: tl.constexpr,
                    HARDWARE: tl.constexpr):  # fmt: skip
    """The blocks of a group from (row, column) on: a tuple of fp32 [ROWS, 16]."""
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    blocks = ()
    for place in tl.static_range(_PER_GROUP):
        x = load_tile(x_ptr, x_stride, row, column + place * _BLOCK, M, K, ROWS, _BLOCK, HARDWARE)
        y = prepared_tile(x, IS_BF16, x_ptr, 0, None, CONFIG, ROWS, _BLOCK, HARDWARE)
        blocks = blocks + (y,)
    return blocks


@triton.jit
def with_group(blocks, errors, step, coefficients_ptr, first, column, K, SPAN: tl.constexpr):
    """The blocks from `column` of the span on, plus what the group from row `first` of the coefficients on
    lost: errors fp16 [ROWS, 64], step fp32 [ROWS, 1].
    """
    shifted = ()
    for place in tl.static_range(_PER_GROUP):
        start = column + place * _BLOCK
        shares = load_coefficients(coefficients_ptr, first, start, K, SPAN, _GROUP)
        total = tl.dot(errors, shares, out_dtype=tl.float32)
        shifted = shifted + (blocks[place] + total * step,)
    return shifted


@triton.jit
def keep_group(errors, steps, errors_ptr, steps_ptr, rows, group, width, groups, M):
    """Write what a group lost, in the largest of its blocks' units: int8 [M, width], fp32 [M, groups]."""
    largest = steps[0]
    for place in tl.static_range(1, _PER_GROUP):
        largest = tl.maximum(largest, steps[place])
    divisor = tl.where(largest > 0.0, largest, 1.0)
    column = group * _GROUP + tl.arange(0, _BLOCK)[None, :]
    for place in tl.static_range(_PER_GROUP):
        shared = whole(errors[place].to(tl.float32) * tl.div_rn(steps[place], divisor))
        places = errors_ptr + rows.to(tl.int64) * width + column + place * _BLOCK
        tl.store(places, shared.to(tl.int8), mask=rows < M)
    tl.store(steps_ptr + rows.to(tl.int64) * groups + group, largest, mask=rows < M)


@triton.jit
def feedback_groups_kernel(
    x_ptr, x_stride, M, K, coefficients_ptr, out_ptr, out_stride, out_k, amax_ptr, global_ptr,
    errors_ptr, width, steps_ptr, groups,
    CONFIG: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """As `feedback_kernel`, for spans of more than a group. errors_ptr: int8 [M, width] and steps_ptr: fp32
    [M, groups], which it uses as memory of its own.
    """
    spans = tl.maximum(tl.cdiv(K, SPAN), 1)
    row, span = (tl.program_id(0) // spans) * ROWS, (tl.program_id(0) % spans) * SPAN
    tensor_bits = tensor_amax(amax_ptr, global_ptr, CONFIG, PARTS)
    decode = global_scale(tensor_bits, CONFIG)
    rows = row + tl.arange(0, ROWS)[:, None]
    within = tl.arange(0, _GROUP)[None, :]
    for group in range(tl.cdiv(SPAN, _GROUP)):
        start = group * _GROUP
        blocks = prepared_blocks(x_ptr, x_stride, row, span + start, M, K, CONFIG, ROWS, HARDWARE)
        for earlier in range(group):
            number = span // _GROUP + earlier
            places = errors_ptr + rows.to(tl.int64) * width + number * _GROUP + within
            before = tl.load(places, mask=rows < M, other=0).to(tl.float16)
            step = tl.load(steps_ptr + rows.to(tl.int64) * groups + number, mask=rows < M, other=0.0)
            first = span + earlier * _GROUP
            blocks = with_group(blocks, before, step, coefficients_ptr, first, start, K, SPAN)
        errors, steps = (), ()
        for place in tl.static_range(_PER_GROUP):
            y, offset = blocks[place], start + place * _BLOCK
            for earlier in tl.static_range(place):
                first = span + start + earlier * _BLOCK
                shares = load_coefficients(coefficients_ptr, first, offset, K, SPAN, _BLOCK)
                y += tl.dot(errors[earlier], shares, out_dtype=tl.float32) * steps[earlier]
            amax_bits = block_amax(y, CONFIG, ROWS, _BLOCK)
            rounded, scaled, scale = rounded_tile(
                y, amax_bits, tensor_bits, row, offset, amax_ptr, 0, None, CONFIG, ROWS, _BLOCK
            )
            error, step = lost(rounded, scaled, scale, decode, ROWS)
            errors, steps = errors + (error,), steps + (step,)
            store_values(
                out_ptr, out_stride, out_k, M, row, span + offset, rounded, scaled, scale, ROWS, HARDWARE
            )
        keep_group(errors, steps, errors_ptr, steps_ptr, rows, span // _GROUP + group, width, groups, M)
        tl.debug_barrier()
