"""Launches of the kernels that dequantize or transpose packed operands, or quantize and dequantize."""
# pyright: reportCallIssue=false, reportArgumentType=false
# (kernels are launched with the options of their compiler)

import torch
from torch import Tensor

from fourbits.quant.kernels.dequantize_triton import (
    dequantize_kernel,
    dequantize_transposed_kernel,
    transpose_kernel,
)
from fourbits.quant.kernels.exact_triton import operands_kernel
from fourbits.quant.kernels.kernel_config import NoiseKey, Plan
from fourbits.quant.kernels.start_exact import SHORT, Tile, group, programs, rounded_up, tall, wide

#: rows, entries of a row, warps: a thread has one entry of every row
_ROW_TILE = (4, 128, 4)
#: words of a column, columns, warps
_COLUMN_TILE = (8, 128, 4)
#: eights of rows, words of a row, warps
_TRANSPOSED_TILE = (16, 16, 4)


def dequantized(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    size: int,
    block: tuple[int, int],
    power_of_two: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Values [R, size] of codes uint8 [R, width], contiguous, and bytes of block scales.

    size: of the contraction axis, at most 2 * width; dtype: fp32, bf16 or fp16.
    """
    R = codes.shape[0]
    out = torch.empty((R, size), dtype=dtype, device=codes.device)
    entries = codes.view(torch.int16 if dtype == torch.float32 else torch.int32) if codes.numel() else codes
    rows, length, warps = _ROW_TILE if codes.is_cuda else (4, 16, 4)
    count = -(-R // rows) * -(-entries.shape[1] // length)
    if out.numel():
        dequantize_kernel[(count,)](
            entries,
            scales,
            global_scale,
            out,
            R,
            size,
            entries.shape[1],
            scales.shape[1],
            BLOCK_ROWS=block[0],
            BLOCK=block[1],
            POWER_OF_TWO=power_of_two,
            ROWS=rows,
            ENTRIES=length,
            HARDWARE=codes.is_cuda,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


def dequantized_columns(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    size: int,
    block: tuple[int, int],
    power_of_two: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Values [size, K] of the codes of its columns, uint8 [K, width]; arguments as for `dequantized`."""
    K = codes.shape[0]
    out = torch.empty((size, K), dtype=dtype, device=codes.device)
    words, columns, warps = _COLUMN_TILE if codes.is_cuda else (8, 16, 4)
    if out.numel():
        stored = codes.view(torch.int32)
        dequantize_transposed_kernel[(-(-size // (8 * words)) * -(-K // columns),)](
            stored,
            scales,
            global_scale,
            out,
            size,
            K,
            stored.shape[1],
            scales.shape[1],
            BLOCK_ROWS=block[0],
            BLOCK=block[1],
            POWER_OF_TWO=power_of_two,
            WORDS=words,
            COLUMNS=columns,
            HARDWARE=codes.is_cuda,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


def transposed(codes: Tensor, scales: Tensor, columns: int, block: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [columns, Rp / 2] and scales of the transpose, from codes uint8 [R, width], contiguous.

    columns: without padding; block: of its square blocks, 16 or 32; scales: bytes [down, across].
    """
    R = codes.shape[0]
    out = torch.empty((columns, rounded_up(R, 16) // 8), dtype=torch.int32, device=codes.device)
    out_scales = torch.empty((scales.shape[1], scales.shape[0]), dtype=torch.uint8, device=codes.device)
    eights, words, warps = _TRANSPOSED_TILE
    if codes.numel():
        stored = codes.view(torch.int32)
        transpose_kernel[(-(-R // (8 * eights)) * -(-stored.shape[1] // words),)](
            stored,
            scales,
            out,
            out_scales,
            R,
            stored.shape[1],
            columns,
            out.shape[1],
            scales.shape[0],
            scales.shape[1],
            BLOCK=block,
            EIGHTS=eights,
            WORDS=words,
            num_warps=warps,
        )
    return out.view(torch.uint8), out_scales


def fake_quantized(x: Tensor, plan: Plan, amax: Tensor | None, key: NoiseKey | None) -> Tensor:
    """What `dequantize` gives of x's codes and scales by the plan, in x's dtype, in one read.

    x: [M, K] with unit stride along K; after a transform, the transformed tensor with its padding.
    """
    M, K = x.shape
    rows = rounded_up(M, group(plan)) if plan.transform is not None else M
    out = torch.empty((rows, K), dtype=x.dtype, device=x.device)
    scale = torch.empty(2, dtype=torch.float32, device=x.device)
    entries, fields, stream = key or NoiseKey(scale)
    amax = scale[:1] if amax is None else amax
    row = plan.axis == 1
    tile = _tile(x, plan)
    count = programs(x, tile)
    operands_kernel[(count,)](
        x,
        x.stride(0),
        M,
        K,
        out,
        out.stride(0),
        K,
        amax,
        entries,
        stream,
        out,
        out.stride(0),
        scale,
        rows,
        amax,
        entries,
        stream,
        scale,
        scale,
        scale,
        ROW=plan if row else None,
        ROW_FIELDS=fields,
        ROW_PARTS=amax.shape[0],
        COLUMN=None if row else plan,
        COLUMN_FIELDS=fields,
        COLUMN_PARTS=amax.shape[0],
        COLUMN_PACKED=False,
        COLUMN_VECTOR=tile.vector,
        OBSERVE=False,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        HARDWARE=x.is_cuda,
        DEQUANTIZED=True,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    return out


def _tile(x: Tensor, plan: Plan) -> Tile:
    rows = tall(plan)
    if not x.is_cuda:
        return Tile(rows, 128, 4)
    return wide(x, rows, 64, 1) if rows > SHORT else wide(x, max(8, rows), 1024, 8 if rows <= 16 else 4)
