"""Error feedback in a kernel: the blocks of a span one after the other. docs/nvfp4.md, section 25.

A program owns a strip of rows of one span. Errors and coefficients are integers of at most 7 bits, so tensor
cores multiply and add them exactly. The reference is reference/error_feedback.py.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.feedback_coefficients import LARGEST, UNITS
from fourbits.quant.kernels.rounding_triton import rounded_to, with_sign
from fourbits.quant.kernels.scaling_triton import block_amax
from fourbits.quant.kernels.tile_triton import (
    global_scale,
    load_tile,
    prepared_tile,
    rounded_tile,
    tensor_amax,
)

#: elements of a block; units of an error and of a coefficient; the largest of either; adding and taking away
#: this number rounds to whole ones
_BLOCK = tl.constexpr(16)
_UNITS = tl.constexpr(float(UNITS))
_LARGEST = tl.constexpr(float(LARGEST))
_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def whole(x):
    """x rounded to whole numbers, to even, for magnitudes below 2^22."""
    return (x + _WHOLE) - _WHOLE


@triton.jit
def lost(rounded, scaled, scale, decode, ROWS: tl.constexpr):
    """(errors of a column of blocks in whole units, fp16 [ROWS, 16]; the value of one, fp32 [ROWS, 1])."""
    error = (scaled - with_sign(rounded, scaled)) * _UNITS
    error = whole(tl.minimum(tl.maximum(error, -_LARGEST), _LARGEST))
    step = scale * decode * (1.0 / (_UNITS * _UNITS))
    error = tl.where(step > 0.0, error, 0.0)
    step = tl.where(step > 0.0, step, 0.0)
    return tl.reshape(error, (ROWS, _BLOCK)).to(tl.float16), tl.reshape(step, (ROWS, 1))


@triton.jit
def load_coefficients(coefficients_ptr, first, column, K, SPAN: tl.constexpr, COUNT: tl.constexpr):
    """What errors in COUNT rows from `first` on add to the block from `column` on: fp16 [COUNT, 16]."""
    rows = first + tl.arange(0, COUNT)[:, None]
    columns = column + tl.arange(0, _BLOCK)[None, :]
    inside = (rows < K) & (columns < SPAN)
    return tl.load(coefficients_ptr + rows * SPAN + columns, mask=inside, other=0).to(tl.float16)


@triton.jit
def store_values(out_ptr, out_stride, out_k, M, row, column, rounded, scaled, scale, ROWS: tl.constexpr,
                 HARDWARE: tl.constexpr):  # fmt: skip
    """Write a column of blocks, element * block scale in bf16, from (row, column) on."""
    values = tl.reshape(with_sign(rounded * scale, scaled), (ROWS, _BLOCK))
    rows = row + tl.arange(0, ROWS)[:, None]
    columns = column + tl.arange(0, _BLOCK)[None, :]
    places = out_ptr + rows.to(tl.int64) * out_stride + columns
    values = rounded_to(values, tl.bfloat16, HARDWARE)
    tl.store(places, values, mask=(rows < M) & (columns < out_k))


@triton.jit
def feedback_kernel(
    x_ptr, x_stride, M, K, coefficients_ptr, out_ptr, out_stride, out_k, amax_ptr, global_ptr,
    CONFIG: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """The exact row operand of x [M, K], element * block scale, bf16 [M, out_k]; global_ptr: its scale.

    coefficients_ptr: int8 [K, SPAN]; amax_ptr: fp32 [PARTS], whose largest is the tensor's amax.
    """
    IS_BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    spans = tl.maximum(tl.cdiv(K, SPAN), 1)
    row, span = (tl.program_id(0) // spans) * ROWS, (tl.program_id(0) % spans) * SPAN
    tensor_bits = tensor_amax(amax_ptr, global_ptr, CONFIG, PARTS)
    decode = global_scale(tensor_bits, CONFIG)
    errors, steps = (), ()
    for place in tl.static_range(SPAN // _BLOCK):
        column = span + place * _BLOCK
        x = load_tile(x_ptr, x_stride, row, column, M, K, ROWS, _BLOCK, HARDWARE)
        y = prepared_tile(x, IS_BF16, amax_ptr, 0, None, CONFIG, ROWS, _BLOCK, HARDWARE)
        for earlier in tl.static_range(place):
            shares = load_coefficients(
                coefficients_ptr, span + earlier * _BLOCK, place * _BLOCK, K, SPAN, _BLOCK
            )  # fmt: skip
            y += tl.dot(errors[earlier], shares, out_dtype=tl.float32) * steps[earlier]
        amax_bits = block_amax(y, CONFIG, ROWS, _BLOCK)
        rounded, scaled, scale = rounded_tile(
            y, amax_bits, tensor_bits, row, column, amax_ptr, 0, None, CONFIG, ROWS, _BLOCK
        )
        error, step = lost(rounded, scaled, scale, decode, ROWS)
        errors, steps = errors + (error,), steps + (step,)
        store_values(out_ptr, out_stride, out_k, M, row, column, rounded, scaled, scale, ROWS, HARDWARE)
