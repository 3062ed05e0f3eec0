"""The product on sm_90 and newer: persistent programs whose tiles arrive by bulk tensor copies.

An operand is read in the layout it is kept in: one whose contraction axis is 0 is turned by the tensor core's
own addressing of shared memory, so no layout needs a transposing copy.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.gemm.matmul_tile_triton import added_product, bias_of, finished, rounded_to, tile_position


@triton.jit
def store_parts(out, acc, row, column, ACCUMULATE: tl.constexpr, PARTS: tl.constexpr, HARDWARE: tl.constexpr):
    """Write acc to out in PARTS column ranges, which bounds the shared memory that leaving takes."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    if PARTS == 1:
        if ACCUMULATE:
            acc = acc + out.load([row, column]).to(tl.float32)
        out.store([row, column], rounded_to(acc, out.dtype, HARDWARE))
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        store_parts(out, left, row, column, ACCUMULATE, PARTS // 2, HARDWARE)
        store_parts(out, right, row, column + BN // 2, ACCUMULATE, PARTS // 2, HARDWARE)


@triton.jit
def bulk_kernel(
    a, b, out, scale_a_ptr, scale_b_ptr, bias_ptr, M, N, K,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [M, N] = (sum over K) * scale_a * scale_b + bias, plus what out holds if ACCUMULATE.

    a, b, out: tensor descriptors; a is [M, K], or [K, M] if A_TURNED; b is [N, K], or [K, N] if not B_TURNED.
    """
    scale_a = tl.load(scale_a_ptr)
    scale_b = tl.load(scale_b_ptr)
    down = tl.cdiv(M, BM)
    across = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        i, j = tile_position(tile, down, across)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(tl.cdiv(K, BK)):
            if A_TURNED:
                left = a.load([step * BK, i * BM]).T
            else:
                left = a.load([i * BM, step * BK])
            if B_TURNED:
                right = b.load([j * BN, step * BK]).T
            else:
                right = b.load([step * BK, j * BN])
            acc = added_product(acc, left, right, HARDWARE)
        bias = bias_of(bias_ptr, j * BN + tl.arange(0, BN), N, HAS_BIAS)
        acc = finished(acc, scale_a, scale_b, bias, HAS_BIAS)
        store_parts(out, acc, i * BM, j * BN, ACCUMULATE, PARTS, HARDWARE)
