"""GEMMs of groups of rows, such as the tokens of experts, by persistent programs that load tiles by TMA.

The main loop is that of `tma_kernel`; a map gives each tile's group and rows.
"""
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (the types of kernels are their compiler's)

import triton
import triton.language as tl

from fourbits.gemm.kernels.tile_triton import bias_of, finished, summed, tile_position
from fourbits.quant.kernels.rounding_triton import as_fp32, rounded_to


@triton.jit
def store_inside(
    acc, out_ptr, stride, row, rows, column, columns, PARTS: tl.constexpr, HARDWARE: tl.constexpr
):
    """Write a tile's first `rows` rows from (row, column) on, left of `columns`, in PARTS ranges."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    if PARTS == 1:
        down = tl.arange(0, BM)[:, None]
        across = column + tl.arange(0, BN)[None, :]
        start = out_ptr + row.to(tl.int64) * stride
        values = rounded_to(acc, out_ptr.dtype.element_ty, HARDWARE)
        tl.store(start + down * stride + across, values, mask=(down < rows) & (across < columns))
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        store_inside(left, out_ptr, stride, row, rows, column, columns, PARTS // 2, HARDWARE)
        store_inside(right, out_ptr, stride, row, rows, column + BN // 2, columns, PARTS // 2, HARDWARE)


@triton.jit
def grouped_rows_kernel(
    a, b, out_ptr, out_stride, scale_a_ptr, scale_b_ptr, bias_ptr, entries_ptr, starts_ptr, groups, N, K,
    b_rows, B_TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK:
    tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [rows of group e, N] = (a [rows of e, K] @ b of e) * scale_a[e] * scale_b[e] + bias[e].

    a, b: tensor descriptors; a is [M, K]; b has b_rows rows for each group, [K, N], or [N, K] if
    B_TRANSPOSED. The map has tiles of BM rows.
    """
    across = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    tiles = tl.load(starts_ptr + groups)
    for work in tl.range(tl.program_id(0), tiles * across, PROGRAMS, flatten=True):
        entry = entries_ptr + (work // across) * 4
        group, begin, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        column = (work % across) * BN
        if B_TRANSPOSED:
            acc = summed(a, begin, 0, b, group * b_rows + column, 0, steps, False, True, BM, BN, BK, HARDWARE)
        else:
            acc = summed(a, begin, 0, b, column, group * b_rows, steps, False, False, BM, BN, BK, HARDWARE)
        columns = column + tl.arange(0, BN)
        bias = bias_of(bias_ptr + group * N, columns, N, HAS_BIAS)
        acc = finished(acc, tl.load(scale_a_ptr + group), tl.load(scale_b_ptr + group), bias, HAS_BIAS)
        store_inside(acc, out_ptr, out_stride, begin, rows, column, N, PARTS, HARDWARE)


@triton.jit
def grouped_sums_kernel(
    a, b, out_ptr, scale_first_ptr, scale_second_ptr, starts_ptr, groups, M, N,
    HEIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out [groups, M, N] = (a of e [rows, M]^T @ b of e [rows, N]) * scale_first[e] * scale_second[e].

    a, b: tensor descriptors of the rows of all groups. Group e begins at row starts[e] * HEIGHT and is padded
    with zeros to whole tiles of HEIGHT rows. A group without rows gets zeros.
    """
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for work in tl.range(tl.program_id(0), groups * down * across, PROGRAMS):
        group = work // (down * across)
        i, j = tile_position(work % (down * across), down, across)
        first, last = tl.load(starts_ptr + group) * HEIGHT, tl.load(starts_ptr + group + 1) * HEIGHT
        steps = (last - first) // BK
        acc = summed(a, i * BM, first, b, j * BN, first, steps, True, False, BM, BN, BK, HARDWARE)
        used = last > first  # the scales of a group without rows are undefined
        scale_first = tl.load(scale_first_ptr + group, mask=used, other=0.0)
        scale_second = tl.load(scale_second_ptr + group, mask=used, other=0.0)
        acc = finished(acc, scale_first, scale_second, bias_of(out_ptr, tl.arange(0, BN), 0, False), False)
        out = out_ptr + group.to(tl.int64) * M * N
        store_inside(acc, out, N, i * BM, M - i * BM, j * BN, N, PARTS, HARDWARE)


@triton.jit
def grouped_columns_kernel(
    x_ptr, x_stride, out_ptr, offsets_ptr, N,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """out fp32 [groups, N]: the sum of each group's rows, in an order that depends on their number only."""
    group = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first, last = tl.load(offsets_ptr + group), tl.load(offsets_ptr + group + 1)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in tl.range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)[:, None]
        inside = (rows < last) & (columns < N)
        x = tl.load(x_ptr + rows.to(tl.int64) * x_stride + columns, mask=inside, other=0.0)
        acc += as_fp32(x, HARDWARE)
    out = out_ptr + group * N + columns
    tl.store(out, tl.sum(acc, axis=0)[None, :], mask=columns < N)
