"""The product on sm_90 and newer: persistent programs whose tiles arrive by bulk tensor copies.

An operand is read in the layout it is kept in: one whose contraction axis is 0 is turned by the tensor core's
own addressing of shared memory, so no layout needs a transposing copy. A small product over a long
contraction (the weight gradient of a narrow layer) is cut along it, so that the whole card works; the parts
are added in order.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.gemm.kernels.tile_triton import added_product, bias_of, finished, rounded_to, tile_position


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
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CUTS: tl.constexpr, PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [M, N] = (sum over K) * scale_a * scale_b + bias, plus what out holds if ACCUMULATE.

    a, b, out: tensor descriptors; a is [M, K], or [K, M] if A_TURNED; b is [N, K], or [K, N] if not B_TURNED.
    With CUTS > 1 out is fp32 [CUTS * M rounded up to BM, N] and takes each cut's bare sum.
    """
    scale_a = tl.load(scale_a_ptr)
    scale_b = tl.load(scale_b_ptr)
    down = tl.cdiv(M, BM)
    across = tl.cdiv(N, BN)
    steps = tl.cdiv(tl.cdiv(K, BK), CUTS)
    for work in tl.range(tl.program_id(0), down * across * CUTS, PROGRAMS, flatten=True):
        i, j = tile_position(work // CUTS, down, across)
        first = (work % CUTS) * steps
        acc = tl.zeros((BM, BN), tl.float32)
        for i_step in range(steps):
            step = first + i_step  # beyond K there are zeros
            if A_TURNED:
                left = a.load([step * BK, i * BM]).T
            else:
                left = a.load([i * BM, step * BK])
            if B_TURNED:
                right = b.load([j * BN, step * BK]).T
            else:
                right = b.load([step * BK, j * BN])
            acc = added_product(acc, left, right, HARDWARE)
        if CUTS == 1:
            bias = bias_of(bias_ptr, j * BN + tl.arange(0, BN), N, HAS_BIAS)
            acc = finished(acc, scale_a, scale_b, bias, HAS_BIAS)
        row = ((work % CUTS) * down + i) * BM
        store_parts(out, acc, row, j * BN, ACCUMULATE, PARTS, HARDWARE)


@triton.jit(do_not_specialize=["slab"])
def sum_kernel(
    parts_ptr, parts_stride, slab, out_ptr, out_stride, scale_a_ptr, scale_b_ptr, bias_ptr, N,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, CUTS: tl.constexpr, COLUMNS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Add the cuts' sums in order and finish them. parts_ptr: fp32, `slab` rows for each cut."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    part = parts_ptr + row.to(tl.int64) * parts_stride + columns
    acc = tl.zeros((COLUMNS,), tl.float32)
    for cut in tl.static_range(CUTS):
        acc += tl.load(part + cut * slab.to(tl.int64) * parts_stride, mask=inside, other=0.0)
    acc = (acc * tl.load(scale_a_ptr)) * tl.load(scale_b_ptr)
    if HAS_BIAS:
        acc = acc + bias_of(bias_ptr, columns, N, HAS_BIAS)
    out = out_ptr + row.to(tl.int64) * out_stride + columns
    if ACCUMULATE:
        acc = acc + tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, rounded_to(acc, out_ptr.dtype.element_ty, HARDWARE), mask=inside)
