"""Tiles and epilogue of a GEMM: both global scales, bias, rounding.

The scales are balanced, then applied one after the other in FP32: their product may overflow, and folding
one into an operand would not be exact. docs/nvfp4.md, section 12.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.quant.kernels.rounding_triton import bits_of, float_of

#: rows of tiles in a band of tiles that run together, so that both operands stay in the L2 cache
_BAND = tl.constexpr(8)


@triton.jit
def tile_position(tile, down, across):
    """(row, column) of a tile in the tile grid, which is traversed in bands of rows, column by column."""
    per_band = _BAND * across
    first = (tile // per_band) * _BAND
    height = tl.minimum(down - first, _BAND)
    return first + (tile % per_band) % height, (tile % per_band) // height


@triton.jit
def added_product(acc, left, right, HARDWARE: tl.constexpr):
    """acc + left @ right; in fp32 without HARDWARE, because the interpreter does not support bf16."""
    if HARDWARE:
        acc = tl.dot(left, right, acc)
    else:
        acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def summed(a, a_row, a_k, b, b_row, b_k, steps, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HARDWARE: tl.constexpr):  # fmt: skip
    """Sum of `steps` products of tiles, fp32 [BM, BN]: the main loop of a GEMM.

    a, b: tensor descriptors, as in `tma_kernel`; row and k: offsets of the tile and of its contraction in
    each.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(steps):  # TMA loads zeros beyond the tensors
        if A_TRANSPOSED:
            left = a.load([a_k + step * BK, a_row]).T
        else:
            left = a.load([a_row, a_k + step * BK])
        if B_TRANSPOSED:
            right = b.load([b_row, b_k + step * BK]).T
        else:
            right = b.load([b_k + step * BK, b_row])
        acc = added_product(acc, left, right, HARDWARE)
    return acc


@triton.jit
def balanced(scale_a, scale_b):
    """Two fp32 scalars with the same product and close exponents: `balanced` in reference/matmul.py."""
    field_a, field_b = (bits_of(scale_a) >> 23) & 0xFF, (bits_of(scale_b) >> 23) & 0xFF
    moved = tl.minimum(tl.maximum((field_a - field_b) >> 1, -126), 126)
    return scale_a * float_of((127 - moved) << 23), scale_b * float_of((127 + moved) << 23)


@triton.jit
def finished(acc, scale_a, scale_b, bias, HAS_BIAS: tl.constexpr):
    """The epilogue in fp32. acc: fp32 [BM, BN]; bias: fp32 [BN]."""
    scale_a, scale_b = balanced(scale_a, scale_b)
    result = (acc * scale_a) * scale_b
    if HAS_BIAS:
        result = result + bias[None, :]
    return result


@triton.jit
def bias_of(bias_ptr, columns, N, HAS_BIAS: tl.constexpr):
    """Bias of a tile's columns, fp32; zeros without a bias."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros(columns.shape, tl.float32)
    return bias
