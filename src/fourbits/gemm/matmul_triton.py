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

from fourbits.gemm.matmul_bulk_triton import bulk_kernel
from fourbits.gemm.matmul_fp8_triton import fp8_kernel
from fourbits.gemm.matmul_plain_triton import plain_kernel


class Tile(NamedTuple):
    """A tile of the output, its step along the contraction, pipeline stages and warps."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    #: throughput against the largest tile when every multiprocessor has one
    speed: float


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


_LARGE_MEMORY = (
    Tile(128, 256, 64, 4, 8, 1.0),
    Tile(128, 128, 64, 4, 8, 0.82),
    Tile(64, 128, 64, 4, 4, 0.55),
)
#: sm_100 also keeps sums in tensor memory, and stages the output beside the operands
_TENSOR_MEMORY = tuple(tile._replace(stages=3) for tile in _LARGE_MEMORY)
_SMALL_MEMORY = (Tile(128, 128, 32, 3, 8, 1.0), Tile(64, 64, 32, 3, 4, 0.6))
_INTERPRETED = Card(1, True, (Tile(32, 32, 32, 1, 4, 1.0),))
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
    tile = best_tile(card, M, N)
    if card.bulk_copies and all(_copies(x) for x in (a, b, out)):
        _bulk(a, a_axis, b, b_axis, scales, out, bias, accumulate, K, tile, card)
        return
    plain_kernel[(-(-M // tile.m) * -(-N // tile.n),)](
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
    fp8_kernel[(-(-M // _FP8_TILE[0]) * -(-N // _FP8_TILE[1]),)](
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
        enable_fp_fusion=False,
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
def best_tile(card: Card, M: int, N: int) -> Tile:
    """The tile with the least time: rounds of the whole card times the work of a tile over its speed."""

    def time(tile: Tile) -> float:
        rounds = -(-(-(-M // tile.m) * -(-N // tile.n)) // card.processors)
        return rounds * tile.m * tile.n / tile.speed

    return min(card.tiles, key=time)


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
    tile: Tile,
    card: Card,
) -> None:
    M, N = out.shape
    parts = max(1, tile.m * tile.n * out.element_size() // _LEAVING)
    programs = min(card.processors, -(-M // tile.m) * -(-N // tile.n))
    bulk_kernel[(programs,)](
        _descriptor(a, a_axis, K, tile.m, tile.k),
        _descriptor(b, b_axis, K, tile.n, tile.k),
        TensorDescriptor(out, [M, N], [out.stride(0), 1], [tile.m, tile.n // parts]),
        scales[0],
        scales[1],
        scales[0] if bias is None else bias,
        M,
        N,
        K,
        A_TURNED=a_axis == 0,
        B_TURNED=b_axis == 1,
        HAS_BIAS=bias is not None,
        ACCUMULATE=accumulate,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        PARTS=parts,
        PROGRAMS=programs,
        HARDWARE=out.is_cuda,
        num_warps=tile.warps,
        num_stages=tile.stages,
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
