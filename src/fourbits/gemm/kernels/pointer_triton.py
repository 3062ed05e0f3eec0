"""The GEMM with pointer loads, for sm_80 and for operands that TMA cannot address."""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.gemm.kernels.tile_triton import added_product, bias_of, finished, tile_position
from fourbits.quant.kernels.rounding_triton import rounded_to


@triton.jit
def pointer_kernel(
    a_ptr, a_stride_m, a_stride_k, b_ptr, b_stride_n, b_stride_k, out_ptr, out_stride,
    scale_a_ptr, scale_b_ptr, bias_ptr, M, N, K,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [M, N] = (sum over K) * scale_a * scale_b + bias. Any strides; one tile per program."""
    i, j = tile_position(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN))
    rows = i * BM + tl.arange(0, BM)
    columns = j * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    a_rows = a_ptr + rows.to(tl.int64)[:, None] * a_stride_m
    b_rows = b_ptr + columns.to(tl.int64)[None, :] * b_stride_n
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, BK)):
        k = (step * BK + depth).to(tl.int64)
        a_inside = (rows < M)[:, None] & (k < K)[None, :]
        b_inside = (k < K)[:, None] & (columns < N)[None, :]
        left = tl.load(a_rows + k[None, :] * a_stride_k, mask=a_inside, other=0.0)
        right = tl.load(b_rows + k[:, None] * b_stride_k, mask=b_inside, other=0.0)
        acc = added_product(acc, left, right, HARDWARE)
    bias = bias_of(bias_ptr, columns, N, HAS_BIAS)
    acc = finished(acc, tl.load(scale_a_ptr), tl.load(scale_b_ptr), bias, HAS_BIAS)
    out_tile = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out_tile, rounded_to(acc, out_ptr.dtype.element_ty, HARDWARE), mask=inside)
