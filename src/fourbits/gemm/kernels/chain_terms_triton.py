"""The GEMM with an FP4 tensor core's sums, exact for any operands: for tiles left by `chain_kernel`.

Each instruction takes the fastest path that is exact for it: one dot, a dot per group added in FP64, or every
term aligned and truncated as integers. docs/nvfp4.md, section 22.4.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.gemm.kernels.chain_operand_triton import scale_parts, stored_codes, twice
from fourbits.gemm.kernels.chain_triton import DONE, EXACT, FP32_SUMS, add_toward_zero, ratios, store_finished
from fourbits.gemm.kernels.tile_triton import added_product
from fourbits.quant.kernels.rounding_triton import ABS_BITS, EXPONENT_BITS, as_bf16, bits_of, float_of

#: products of a group, whose sum is one term; F; the exponent used for a term that is zero
_GROUP = tl.constexpr(16)
_FRACTION = tl.constexpr(35)
_ZERO = tl.constexpr(-139)
#: FP64: the bits of its significand that FP32 keeps; the bits and the bias of its exponent
_KEPT = tl.constexpr(-(1 << 29))
_BITS = tl.constexpr(52)
_BIAS = tl.constexpr(1023)


@triton.jit
def power(exponent):
    """2^exponent in fp64, of int32 exponents in its normal range."""
    return ((exponent.to(tl.int64) + _BIAS) << _BITS).to(tl.float64, bitcast=True)


@triton.jit
def toward_zero(x):
    """fp64 rounded toward zero to FP32: infinity from 2^128 on, multiples of 2^-149 below 2^-126, no -0."""
    magnitude = tl.abs(x)
    normal = (x.to(tl.int64, bitcast=True) & _KEPT).to(tl.float64, bitcast=True)
    small = tl.where(magnitude < 2.0**-126, magnitude, 0.0)
    subnormal = (small * 2.0**149).to(tl.int64).to(tl.float64) * 2.0**-149
    subnormal = tl.where((x < 0) & (subnormal > 0), -subnormal, subnormal)
    rounded = tl.where(magnitude < 2.0**-126, subnormal, normal)
    infinite = tl.where(x < 0, float("-inf"), float("inf"))
    return tl.where(magnitude >= 2.0**128, infinite, rounded).to(tl.float32)


@triton.jit
def values_dot(a_rows, b_rows, k, K, in_a, in_b, HARDWARE: tl.constexpr):
    """Products of values [M, K] and [N, K] at these positions along K, summed from zero: fp32."""
    inside = k < K
    left = tl.load(a_rows[:, None] + k[None, :], mask=in_a[:, None] & inside[None, :], other=0.0)
    right = tl.load(b_rows[None, :] + k[:, None], mask=in_b[None, :] & inside[:, None], other=0.0)
    acc = tl.zeros((a_rows.shape[0], b_rows.shape[0]), tl.float32)
    return added_product(acc, left, right, HARDWARE)


@triton.jit
def group_operand(codes, codes_row, codes_byte, scales, scales_row, scales_block, rows, R, K, group,
                  SIDE: tl.constexpr, BLOCK: tl.constexpr, E8M0: tl.constexpr):  # fmt: skip
    """A group of each row: twice its elements [rows, 16], and its scale in parts [rows]."""
    k = group * _GROUP + tl.arange(0, _GROUP)
    inside = (rows < R)[:, None] & (k < K)[None, :]
    elements = twice(stored_codes(codes, codes_row, codes_byte, rows, k, inside))
    place = scales + (rows // SIDE).to(tl.int64) * scales_row + (group * _GROUP // BLOCK) * scales_block
    present = (rows < R) & (group * _GROUP < K)
    eighths, exponent, nan = scale_parts(tl.load(place, mask=present, other=0).to(tl.int32), E8M0)
    return elements, eighths, exponent, nan & present


@triton.jit
def whole_dot(left, right, HARDWARE: tl.constexpr):
    """left @ right^T of integers up to 12, int32, 16 products: exact."""
    acc = tl.zeros((left.shape[0], right.shape[0]), tl.float32)
    left, right = as_bf16(left.to(tl.float32), HARDWARE), as_bf16(right.to(tl.float32), HARDWARE)
    return added_product(acc, left, tl.trans(right), HARDWARE).to(tl.int32)


@triton.jit
def aligned(whole, shift):
    """whole * 2^shift, truncated toward zero: int64. whole: int32; shift: at most 27 unless whole is 0."""
    magnitude = tl.abs(whole).to(tl.int64)
    up = magnitude << tl.minimum(tl.maximum(shift, 0), 27).to(tl.int64)
    moved = tl.where(shift >= 0, up, magnitude >> tl.minimum(tl.maximum(-shift, 0), 62).to(tl.int64))
    return tl.where(whole < 0, -moved, moved)


@triton.jit(do_not_specialize=["scales_a_row", "scales_b_row", "M", "steps"])
def chain_terms_kernel(
    a_ptr, codes_a_ptr, codes_a_row, codes_a_byte, scales_a_ptr, scales_a_row, scales_a_block, ratio_a_ptr,
    b_ptr, codes_b_ptr, codes_b_row, codes_b_byte, scales_b_ptr, scales_b_row, scales_b_block, ratio_b_ptr,
    out_ptr, out_stride, done_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, M, N, K, steps,
    SIDE_A: tl.constexpr, SIDE_B: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    E8M0_A: tl.constexpr, E8M0_B: tl.constexpr, HAS_BIAS: tl.constexpr, HEIGHT: tl.constexpr,
    DONE_M: tl.constexpr, DONE_N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRODUCTS: tl.constexpr, WIDTH: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Write tiles [BM, BN] of out inside tiles [DONE_M, DONE_N] that are not done. WIDTH: K of a dot."""
    across = tl.cdiv(N, BN)
    row, column = (tl.program_id(0) // across) * BM, (tl.program_id(0) % across) * BN
    state = tl.load(done_ptr + (row // DONE_M) * tl.cdiv(N, DONE_N) + column // DONE_N)
    if state != DONE:
        rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
        in_a, in_b = rows < M, columns < N
        a_rows, b_rows = a_ptr + rows.to(tl.int64) * K, b_ptr + columns.to(tl.int64) * K
        acc = tl.zeros((BM, BN), tl.float32)
        bad_a, bad_b = tl.zeros((BM,), tl.int32), tl.zeros((BN,), tl.int32)
        for step in range(steps):
            at = step + tl.arange(0, 1)
            ratio = ratios(ratio_a_ptr, row, M, at, steps, HEIGHT, BM) * ratios(
                ratio_b_ptr, column, N, at, steps, HEIGHT, BN
            )
            short = tl.max(ratio, 0) < FP32_SUMS
            if (state == EXACT) & short:
                partial = tl.zeros((BM, BN), tl.float32)
                for piece in tl.static_range(PRODUCTS // WIDTH):
                    k = step * PRODUCTS + piece * WIDTH + tl.arange(0, WIDTH)
                    partial += values_dot(a_rows, b_rows, k, K, in_a, in_b, HARDWARE)
                acc = add_toward_zero(acc, partial, HARDWARE)
            elif state == EXACT:
                total = acc.to(tl.float64)
                for group in tl.static_range(PRODUCTS // _GROUP):
                    k = step * PRODUCTS + group * _GROUP + tl.arange(0, _GROUP)
                    total += values_dot(a_rows, b_rows, k, K, in_a, in_b, HARDWARE).to(tl.float64)
                acc = toward_zero(total)
            else:
                bits = bits_of(acc)
                field = (bits & ABS_BITS) >> 23
                running = tl.where((bits & ABS_BITS) == 0, _ZERO, tl.maximum(field, 1) - 127)
                largest = running
                for g in tl.static_range(PRODUCTS // _GROUP):
                    group = step * (PRODUCTS // _GROUP) + g
                    left, size_a, high, nan_a = group_operand(
                        codes_a_ptr, codes_a_row, codes_a_byte, scales_a_ptr, scales_a_row, scales_a_block,
                        rows, M, K, group, SIDE_A, BLOCK_A, E8M0_A,
                    )  # fmt: skip
                    right, size_b, low, nan_b = group_operand(
                        codes_b_ptr, codes_b_row, codes_b_byte, scales_b_ptr, scales_b_row, scales_b_block,
                        columns, N, K, group, SIDE_B, BLOCK_B, E8M0_B,
                    )  # fmt: skip
                    sizes = whole_dot(tl.abs(left), tl.abs(right), HARDWARE)
                    counts = (sizes > 0) & (size_a > 0)[:, None] & (size_b > 0)[None, :]
                    largest = tl.maximum(largest, tl.where(counts, high[:, None] + low[None, :], _ZERO))
                    bad_a |= nan_a.to(tl.int32)
                    bad_b |= nan_b.to(tl.int32)
                significand = tl.where(field > 0, 1 << 23, 0) | (bits & 0x7FFFFF)
                significand = tl.where(bits < 0, -significand, significand)
                terms = aligned(significand, _FRACTION - 23 - (largest - running))
                for g in tl.static_range(PRODUCTS // _GROUP):
                    group = step * (PRODUCTS // _GROUP) + g
                    left, size_a, high, nan_a = group_operand(
                        codes_a_ptr, codes_a_row, codes_a_byte, scales_a_ptr, scales_a_row, scales_a_block,
                        rows, M, K, group, SIDE_A, BLOCK_A, E8M0_A,
                    )  # fmt: skip
                    right, size_b, low, nan_b = group_operand(
                        codes_b_ptr, codes_b_row, codes_b_byte, scales_b_ptr, scales_b_row, scales_b_block,
                        columns, N, K, group, SIDE_B, BLOCK_B, E8M0_B,
                    )  # fmt: skip
                    whole = whole_dot(left, right, HARDWARE) * (size_a[:, None] * size_b[None, :])
                    terms += aligned(whole, _FRACTION - 8 - (largest - (high[:, None] + low[None, :])))
                found = toward_zero(terms.to(tl.float64) * power(largest - _FRACTION))
                acc = tl.where((bits & ABS_BITS) == EXPONENT_BITS, acc, found)
        poisoned = (bad_a > 0)[:, None] | (bad_b > 0)[None, :]
        acc = tl.where(poisoned, float_of(tl.full((BM, BN), 0x7FFFFFFF, tl.int32)), acc)
        store_finished(
            out_ptr,
            out_stride,
            acc,
            row,
            column,
            scale_a_ptr,
            scale_b_ptr,
            bias_ptr,
            M,
            N,
            HAS_BIAS,
            HARDWARE,
        )
