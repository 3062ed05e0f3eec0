"""Launches GEMMs of FP8 operands in blocks of 128 that no library supports."""

import functools

import torch
from torch import Tensor

from fourbits.gemm.kernels.fp8_triton import fp8_gemm_kernel
from fourbits.gemm.kernels.tiles import ceil_div
from fourbits.quant.kernels.launcher import Launcher
from fourbits.quant.kernels.support import has_fp8
from fourbits.quant.tensor import ExactOperand

#: rows and columns of a tile: for FP8 tensor cores, and if decoding needs registers
_TILE, _DECODING_TILE = (128, 128), (64, 128)
#: bits of mantissa of the formats
_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def matmul(a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N] in out_dtype."""
    (left, scale_a), (right, scale_b) = _stored(a), _stored(b)
    if not has_fp8(left.device):
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    M, N = left.shape[0], right.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=left.device)
    if not out.numel():
        return out
    strides = (left.stride(0), *scale_a.stride(), right.stride(0), *scale_b.stride())
    K = min(left.shape[1], right.shape[1])
    rows = a.scale_block[0], b.scale_block[0]
    dtypes = a.values.dtype, out_dtype
    launch = launcher(left.device, (M, N, K), strides, rows, dtypes, None if bias is None else bias.dtype)
    launch(
        *(left, left.stride(0), scale_a, *scale_a.stride()),
        *(right, right.stride(0), scale_b, *scale_b.stride()),
        *(out, N, scale_a if bias is None else bias, M, N, K),
    )
    return out


@functools.lru_cache(maxsize=4096)
def launcher(
    device: torch.device,
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],
    rows: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    bias: torch.dtype | None,
) -> Launcher:
    """The launch for operands of these sizes, strides and dtypes. dtypes: both operands', the output's."""
    (M, N, _), fp8 = sizes, has_fp8(device)
    rows_of_tile, columns_of_tile = _TILE if fp8 else _DECODING_TILE
    return Launcher(
        fp8_gemm_kernel,
        (ceil_div(M, rows_of_tile) * ceil_div(N, columns_of_tile),),
        device,
        A_ROWS=rows[0],
        B_ROWS=rows[1],
        HAS_BIAS=bias is not None,
        DECODED=0 if fp8 else _MANTISSA[dtypes[0]],
        BM=rows_of_tile,
        BN=columns_of_tile,
        HARDWARE=device.type == "cuda",
        num_warps=8,
        num_stages=3,
    )


def _stored(operand: ExactOperand) -> tuple[Tensor, Tensor]:
    """Values and scales with K last; values stored along the other axis are copied."""
    values = operand.values if operand.axis == 1 else operand.values.t()
    scale = operand.scale if operand.axis == 1 else operand.scale.t()
    return values if values.stride(1) == 1 else values.contiguous(), scale
