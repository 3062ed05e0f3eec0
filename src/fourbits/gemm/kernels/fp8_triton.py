"""The GEMM of FP8 operands in blocks of 128, on FP8 tensor cores (sm_89 and newer) or BF16 tensor cores.

Every 32 elements of K the partial sum is promoted to FP32, because the tensor core accumulates in about 14
bits on Hopper (arXiv:2412.19437, section 3.3.2). Every 128 it is scaled by both block scales and added in
FP32. BF16 tensor cores multiply the same values, which are exact in BF16, and need no promotion.
docs/nvfp4.md, section 12.5.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.gemm.kernels.tile_triton import bias_of, tile_position
from fourbits.quant.kernels.rounding_triton import as_bf16, float_of, rounded_to

BLOCK = tl.constexpr(128)
#: elements of K after which the tensor core's sum is promoted to FP32: one instruction, at no cost in time
PROMOTED_EVERY = tl.constexpr(32)


@triton.jit
def decoded(codes, MANTISSA: tl.constexpr):
    """fp32 values of FP8 codes, uint8; MANTISSA: 3 for E4M3, 2 for E5M2.

    With exponent and mantissa shifted to FP32's positions, a magnitude is the value times a power of two,
    subnormals included.
    """
    TO_VALUE: tl.constexpr = 2.0**120 if MANTISSA == 3 else 2.0**112
    NAN: tl.constexpr = 127 if MANTISSA == 3 else 125
    byte = codes.to(tl.int32)
    magnitude = byte & 127
    values = float_of((magnitude << (23 - MANTISSA)) | ((byte >> 7) << 31)) * TO_VALUE
    if MANTISSA == 2:
        values = tl.where(magnitude == 124, values * float("inf"), values)
    return tl.where(magnitude >= NAN, float("nan"), values)


@triton.jit
def product(left, right, DECODED: tl.constexpr, HARDWARE: tl.constexpr):
    """left @ right, fp32; arguments as loaded by `fp8_gemm_kernel`."""
    if DECODED:
        left, right = decoded(left, DECODED), decoded(right, DECODED)
        if HARDWARE:
            part = tl.dot(as_bf16(left, HARDWARE), as_bf16(right, HARDWARE))
        else:
            part = tl.dot(left, right, input_precision="ieee")
    else:
        part = tl.dot(left, right, max_num_imprecise_acc=PROMOTED_EVERY)
    return part


@triton.jit
def fp8_gemm_kernel(
    a_ptr, a_stride, a_scale_ptr, a_scale_row, a_scale_block,
    b_ptr, b_stride, b_scale_ptr, b_scale_row, b_scale_block,
    out_ptr, out_stride, bias_ptr, M, N, K,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, DECODED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [M, N] = sum over blocks of (a @ b^T) * scale_a * scale_b, + bias.

    a: fp8 [M, K], b: fp8 [N, K], unit stride along K. A scale covers A_ROWS (B_ROWS) rows, 1 or 128, and 128
    elements of K; scale_row and scale_block are the strides of the scale grids. DECODED: 0 for FP8 tensor
    cores; else a and b are codes, uint8, with this many bits of mantissa, for BF16 tensor cores.
    """
    i, j = tile_position(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN))
    rows = i * BM + tl.arange(0, BM)
    columns = j * BN + tl.arange(0, BN)
    depth = tl.arange(0, BLOCK)
    a_tile = a_ptr + rows.to(tl.int64)[:, None] * a_stride + depth[None, :]
    b_tile = b_ptr + columns.to(tl.int64)[None, :] * b_stride + depth[:, None]
    a_scales = a_scale_ptr + (rows // A_ROWS) * a_scale_row
    b_scales = b_scale_ptr + (columns // B_ROWS) * b_scale_row
    ONE_B_SCALE: tl.constexpr = B_ROWS == BN
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, BLOCK)):
        inside = depth < K - step * BLOCK
        left = tl.load(a_tile + step * BLOCK, mask=(rows < M)[:, None] & inside[None, :], other=0.0)
        right = tl.load(b_tile + step * BLOCK, mask=inside[:, None] & (columns < N)[None, :], other=0.0)
        scale_a = tl.load(a_scales + step * a_scale_block, mask=rows < M, other=0.0)
        part = product(left, right, DECODED, HARDWARE)
        if ONE_B_SCALE:
            scale_a = scale_a * tl.load(b_scale_ptr + j * b_scale_row + step * b_scale_block)
            acc += part * scale_a[:, None]
        else:
            scale_b = tl.load(b_scales + step * b_scale_block, mask=columns < N, other=0.0)
            acc += (part * scale_a[:, None]) * scale_b[None, :]
    if HAS_BIAS:
        acc = acc + bias_of(bias_ptr, columns, N, HAS_BIAS)[None, :]
    out_tile = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out_tile, rounded_to(acc, out_ptr.dtype.element_ty, HARDWARE), mask=inside)
