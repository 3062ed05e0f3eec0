"""The GEMM on sm_90 and newer: persistent programs that load tiles by TMA.

Operands are read in the layout they are stored in: an operand with contraction axis 0 is transposed in shared
memory, so no layout needs a transposed copy. Small outputs with a large K (the weight gradient of a narrow
layer) use split-K to fill all SMs; the parts are added in a fixed order.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.gemm.kernels.tile_triton import balanced, bias_of, finished, summed, tile_position
from fourbits.quant.kernels.rounding_triton import rounded_to


@triton.jit
def store_parts(out, acc, row, column, PARTS: tl.constexpr, HARDWARE: tl.constexpr):
    """Write acc to out in PARTS column ranges, which bounds the shared memory for staging."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    if PARTS == 1:
        out.store([row, column], rounded_to(acc, out.dtype, HARDWARE))
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        store_parts(out, left, row, column, PARTS // 2, HARDWARE)
        store_parts(out, right, row, column + BN // 2, PARTS // 2, HARDWARE)


@triton.jit
def tma_kernel(
    a, b, out, scale_a_ptr, scale_b_ptr, bias_ptr, M, N, K,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT_K: tl.constexpr, PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [M, N] = (sum over K) * scale_a * scale_b + bias.

    a, b, out: tensor descriptors; a is [M, K], or [K, M] if A_TRANSPOSED; b is [K, N], or [N, K] if
    B_TRANSPOSED.
    With SPLIT_K > 1, out is fp32 [SPLIT_K * M rounded up to BM, N] and gets the unscaled sum of each part of
    K.
    """
    scale_a = tl.load(scale_a_ptr)
    scale_b = tl.load(scale_b_ptr)
    down = tl.cdiv(M, BM)
    across = tl.cdiv(N, BN)
    steps = tl.cdiv(tl.cdiv(K, BK), SPLIT_K)
    for work in tl.range(tl.program_id(0), down * across * SPLIT_K, PROGRAMS, flatten=True):
        i, j = tile_position(work // SPLIT_K, down, across)
        first = (work % SPLIT_K) * steps * BK
        acc = summed(
            a, i * BM, first, b, j * BN, first, steps, A_TRANSPOSED, B_TRANSPOSED, BM, BN, BK, HARDWARE
        )
        if SPLIT_K == 1:
            bias = bias_of(bias_ptr, j * BN + tl.arange(0, BN), N, HAS_BIAS)
            acc = finished(acc, scale_a, scale_b, bias, HAS_BIAS)
        row = ((work % SPLIT_K) * down + i) * BM
        store_parts(out, acc, row, j * BN, PARTS, HARDWARE)


@triton.jit(do_not_specialize=["slab"])
def sum_kernel(
    parts_ptr, parts_stride, slab, out_ptr, out_stride, scale_a_ptr, scale_b_ptr, bias_ptr, N,
    HAS_BIAS: tl.constexpr, SPLIT_K: tl.constexpr, COLUMNS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Add the split-K sums in order and apply the epilogue. parts_ptr: fp32, `slab` rows per part of K."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    part = parts_ptr + row.to(tl.int64) * parts_stride + columns
    acc = tl.zeros((COLUMNS,), tl.float32)
    for part_of_k in tl.static_range(SPLIT_K):
        acc += tl.load(part + part_of_k * slab.to(tl.int64) * parts_stride, mask=inside, other=0.0)
    scale_a, scale_b = balanced(tl.load(scale_a_ptr), tl.load(scale_b_ptr))
    acc = (acc * scale_a) * scale_b
    if HAS_BIAS:
        acc = acc + bias_of(bias_ptr, columns, N, HAS_BIAS)
    out = out_ptr + row.to(tl.int64) * out_stride + columns
    tl.store(out, rounded_to(acc, out_ptr.dtype.element_ty, HARDWARE), mask=inside)
