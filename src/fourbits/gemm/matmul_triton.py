"""Launches of the products: which kernel, which tile. Operands in either layout, FP32 sums.

Tiles are chosen from the shape by a model of the card, not by timing: the order of FP32 additions, and so the
last bits of a run, do not depend on what else the card was doing when a program started.
"""
# pyright: reportCallIssue=false, reportArgumentType=false
# (kernels are launched with the options of their compiler)

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fourbits.gemm.matmul_bulk_triton import bulk_kernel, sum_kernel
from fourbits.gemm.matmul_fp8_triton import fp8_product_kernel
from fourbits.gemm.matmul_plain_triton import plain_kernel


class Tile(NamedTuple):
    """A tile of the output, its step along the contraction, pipeline stages and warps."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    #: microseconds of a step and of all that is not steps, as measured on an H100; only ratios matter
    step_time: float
    rest_time: float


class Card(NamedTuple):
    """What tiles depend on."""

    processors: int
    bulk_copies: bool
    tiles: tuple[Tile, ...]


class Blocks(NamedTuple):
    """An FP8 operand as stored: values [R, C], unit stride along C; fp32 scales of `rows` x 128 blocks."""

    values: Tensor
    scale: Tensor
    rows: int


class Work(NamedTuple):
    """How a product is divided: into tiles, and into how many cuts of the contraction."""

    tile: Tile
    cuts: int


_LARGE_MEMORY = (
    Tile(128, 256, 64, 4, 8, 0.62, 3.0),
    Tile(128, 128, 64, 4, 8, 0.37, 1.4),
    Tile(64, 128, 64, 4, 4, 0.31, 1.0),
)
#: sm_100 also keeps sums in tensor memory, and stages the output beside the operands
_TENSOR_MEMORY = tuple(tile._replace(stages=3) for tile in _LARGE_MEMORY)
_SMALL_MEMORY = (Tile(128, 128, 32, 3, 8, 0.19, 1.4), Tile(64, 64, 32, 3, 4, 0.12, 1.0))
_INTERPRETED = Card(8, True, (Tile(32, 32, 32, 1, 4, 1.0, 0.0),))
_CUTS = (1, 2, 4, 8)
_SUM_COLUMNS = 512
#: microseconds to start the kernel that adds cuts, and bytes that it moves in one
_SUM_START, _SUM_RATE = 4.0, 2e6
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
    plain_kernel[(_ceil(M, tile.m) * _ceil(N, tile.n),)](
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
    fp8_product_kernel[(_ceil(M, _FP8_TILE[0]) * _ceil(N, _FP8_TILE[1]),)](
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


@functools.cache
def card_of(device: torch.device) -> Card:
    """The card's tiles: shared memory of 227 KiB (sm_90, sm_100) or of about 99 KiB (sm_80, sm_120)."""
    if device.type != "cuda":
        return _INTERPRETED
    facts = torch.cuda.get_device_properties(device)
    tiles = _TENSOR_MEMORY if facts.major == 10 else _LARGE_MEMORY
    if facts.shared_memory_per_block_optin < 220 << 10:
        tiles = _SMALL_MEMORY
    return Card(facts.multi_processor_count, facts.major >= 9, tiles)


@functools.lru_cache(maxsize=4096)
def best_work(card: Card, M: int, N: int, K: int, cuts: tuple[int, ...] = _CUTS) -> Work:
    """The division with the least time: rounds of the whole card times a tile's time, and adding the cuts."""

    def time(work: Work) -> float:
        tile = work.tile
        rounds = _ceil(_ceil(M, tile.m) * _ceil(N, tile.n) * work.cuts, card.processors)
        steps = _ceil(_ceil(K, tile.k), work.cuts)
        adding = 0.0 if work.cuts == 1 else _SUM_START + 8.0 * work.cuts * M * N / _SUM_RATE
        return rounds * (steps * tile.step_time + tile.rest_time) + adding

    return min((Work(tile, count) for tile in card.tiles for count in cuts), key=time)


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
    slab = _ceil(M, tile.m) * tile.m
    target = out
    if cuts > 1:
        target = out.new_empty((cuts * slab, _ceil(N, 4) * 4), dtype=torch.float32)
    parts = max(1, tile.m * tile.n * target.element_size() // _LEAVING)
    programs = min(card.processors, _ceil(M, tile.m) * _ceil(N, tile.n) * cuts)
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
    sum_kernel[(M, _ceil(N, _SUM_COLUMNS))](
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


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _descriptor(x: Tensor, axis: int, length: int, rows: int, step: int) -> TensorDescriptor:
    """x as a bulk copy sees it: cut to `length` along the contraction, in boxes of rows by step."""
    if axis == 1:
        return TensorDescriptor(x, [x.shape[0], length], [x.stride(0), 1], [rows, step])
    return TensorDescriptor(x, [length, x.shape[1]], [x.stride(0), 1], [step, rows])


def _copies(x: Tensor) -> bool:
    """Whether bulk copies can address x: unit stride, rows and base on 16 bytes, not empty."""
    size = x.element_size()
    return x.stride(1) == 1 and x.stride(0) * size % 16 == 0 and x.data_ptr() % 16 == 0 and x.numel() > 0
