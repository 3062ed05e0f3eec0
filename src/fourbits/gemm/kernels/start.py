"""Launches of the products: which kernel, with which operands. Either layout, FP32 sums."""
# pyright: reportCallIssue=false, reportArgumentType=false
# (kernels are launched with the options of their compiler)

from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fourbits.gemm.kernels.fp8_triton import fp8_product_kernel
from fourbits.gemm.kernels.pointer_triton import plain_kernel
from fourbits.gemm.kernels.tiles import Card, best_work, card_of, ceil_div
from fourbits.gemm.kernels.tma_triton import bulk_kernel, sum_kernel


class Blocks(NamedTuple):
    """An FP8 operand as stored: values [R, C], unit stride along C; fp32 scales of `rows` x 128 blocks."""

    values: Tensor
    scale: Tensor
    rows: int


_SUM_COLUMNS = 512
_FP8_TILE = (128, 128)
#: bytes of shared memory in which a tile leaves the bulk kernel
_LEAVING = 32 << 10


def matmul(
    a: Tensor,
    a_axis: int,
    b: Tensor,
    b_axis: int,
    scales: tuple[Tensor, Tensor],
    out: Tensor,
    bias: Tensor | None,
    accumulate: bool,
) -> None:
    """Write the scaled product of two bf16 operands to out [M, N], or add it to what out holds.

    a is [M, K] for a_axis 1 and [K, M] for a_axis 0; b is [N, K] or [K, N] likewise; scales: fp32 scalars.
    """
    M, N = out.shape
    K = min(a.shape[a_axis], b.shape[b_axis])  # what one has beyond is the other's zero padding
    card = card_of(out.device)
    if card.bulk_copies and all(_copies(x) for x in (a, b, out)):
        _bulk(a, a_axis, b, b_axis, scales, out, bias, accumulate, K, card)
        return
    tile = best_work(card, M, N, K, cuts=(1,)).tile
    plain_kernel[(ceil_div(M, tile.m) * ceil_div(N, tile.n),)](
        a,
        a.stride(1 - a_axis),
        a.stride(a_axis),
        b,
        b.stride(1 - b_axis),
        b.stride(b_axis),
        out,
        out.stride(0),
        scales[0],
        scales[1],
        scales[0] if bias is None else bias,
        M,
        N,
        K,
        HAS_BIAS=bias is not None,
        ACCUMULATE=accumulate,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        HARDWARE=out.is_cuda,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


def matmul_fp8(a: Blocks, b: Blocks, out: Tensor, bias: Tensor | None, accumulate: bool) -> None:
    """Write the product of two FP8 operands to out [M, N], or add it to what out holds."""
    M, N = out.shape
    fp8_product_kernel[(ceil_div(M, _FP8_TILE[0]) * ceil_div(N, _FP8_TILE[1]),)](
        a.values,
        a.values.stride(0),
        a.scale,
        a.scale.stride(0),
        a.scale.stride(1),
        b.values,
        b.values.stride(0),
        b.scale,
        b.scale.stride(0),
        b.scale.stride(1),
        out,
        out.stride(0),
        a.scale if bias is None else bias,
        M,
        N,
        min(a.values.shape[1], b.values.shape[1]),
        A_ROWS=a.rows,
        B_ROWS=b.rows,
        HAS_BIAS=bias is not None,
        ACCUMULATE=accumulate,
        BM=_FP8_TILE[0],
        BN=_FP8_TILE[1],
        HARDWARE=out.is_cuda,
        num_warps=8,
        num_stages=3,
    )


def _bulk(
    a: Tensor,
    a_axis: int,
    b: Tensor,
    b_axis: int,
    scales: tuple[Tensor, Tensor],
    out: Tensor,
    bias: Tensor | None,
    accumulate: bool,
    K: int,
    card: Card,
) -> None:
    M, N = out.shape
    tile, cuts = best_work(card, M, N, K)
    slab = ceil_div(M, tile.m) * tile.m
    target = out
    if cuts > 1:
        target = out.new_empty((cuts * slab, ceil_div(N, 4) * 4), dtype=torch.float32)
    parts = max(1, tile.m * tile.n * target.element_size() // _LEAVING)
    programs = min(card.processors, ceil_div(M, tile.m) * ceil_div(N, tile.n) * cuts)
    bulk_kernel[(programs,)](
        _descriptor(a, a_axis, K, tile.m, tile.k),
        _descriptor(b, b_axis, K, tile.n, tile.k),
        TensorDescriptor(target, list(target.shape), [target.stride(0), 1], [tile.m, tile.n // parts]),
        scales[0],
        scales[1],
        scales[0] if bias is None else bias,
        M,
        N,
        K,
        A_TURNED=a_axis == 0,
        B_TURNED=b_axis == 1,
        HAS_BIAS=bias is not None and cuts == 1,
        ACCUMULATE=accumulate and cuts == 1,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        CUTS=cuts,
        PARTS=parts,
        PROGRAMS=programs,
        HARDWARE=out.is_cuda,
        num_warps=tile.warps,
        num_stages=tile.stages - (cuts > 1),  # cut sums are staged at full width
        enable_fp_fusion=False,
    )
    if cuts > 1:
        _add_cuts(target, out, scales, bias, accumulate, cuts)


def _add_cuts(
    parts: Tensor,
    out: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    accumulate: bool,
    cuts: int,
) -> None:
    M, N = out.shape
    sum_kernel[(M, ceil_div(N, _SUM_COLUMNS))](
        parts,
        parts.stride(0),
        parts.shape[0] // cuts,
        out,
        out.stride(0),
        scales[0],
        scales[1],
        scales[0] if bias is None else bias,
        N,
        HAS_BIAS=bias is not None,
        ACCUMULATE=accumulate,
        CUTS=cuts,
        COLUMNS=_SUM_COLUMNS,
        HARDWARE=out.is_cuda,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _descriptor(x: Tensor, axis: int, length: int, rows: int, step: int) -> TensorDescriptor:
    """x as a bulk copy sees it: cut to `length` along the contraction, in boxes of rows by step."""
    if axis == 1:
        return TensorDescriptor(x, [x.shape[0], length], [x.stride(0), 1], [rows, step])
    return TensorDescriptor(x, [length, x.shape[1]], [x.stride(0), 1], [step, rows])


def _copies(x: Tensor) -> bool:
    """Whether bulk copies can address x: unit stride, rows and base on 16 bytes, not empty."""
    size = x.element_size()
    return x.stride(1) == 1 and x.stride(0) * size % 16 == 0 and x.data_ptr() % 16 == 0 and x.numel() > 0
