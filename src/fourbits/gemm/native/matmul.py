"""The GEMM on FP4 tensor cores (sm_100 and newer), through PyTorch's scaled_mm.

cuBLAS takes NVFP4 as it is stored here: codes with K last for both operands, one E4M3 scale per 1x16 block in
tiles of 128x4, one FP32 scale per tensor. PyTorch multiplies the two FP32 scales first, in FP32; if their
product leaves the range of normal numbers, use the emulated GEMM.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad

from fourbits.formats.packing import swizzle_scales
from fourbits.quant.tensor import QuantizedTensor

#: K and the columns of the output must be multiples of these
_CONTRACTION, _COLUMNS = 32, 16
_RECIPE = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
_SWIZZLE = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]


class NativeOperand(NamedTuple):
    """An operand in the layout that the tensor cores read."""

    #: uint8 [R, C / 2], contiguous
    codes: Tensor
    #: float8_e4m3fn, the flat layout of `swizzle_scales` for [R, C / 16]
    scales: Tensor
    #: fp32 scalar
    global_scale: Tensor


def native_operand(q: QuantizedTensor, row_multiple: int = 1) -> NativeOperand:
    """q for the tensor cores: scales of square blocks repeated per row and swizzled, padded with zeros.

    Raises ValueError for formats other than nvfp4 with blocks of 16 along the contraction.
    """
    size = q.spec.block_size
    if q.spec.format != "nvfp4" or size is None or size[1] != 16:
        raise ValueError(
            f"native GEMM: needs nvfp4 in blocks of 16 along the contraction, got {q.spec.format} {size}. "
            "Use the emulated backend."
        )
    rows, width = q.codes.shape
    scales = q.block_scale.view(torch.uint8)
    if size[0] > 1:
        scales = scales.repeat_interleave(size[0], 0)[:rows]
    more_rows, more_bytes = -rows % row_multiple, -width % (_CONTRACTION // 2)
    codes = q.codes
    if more_rows or more_bytes:  # padding by nothing would copy
        codes = pad(codes, (0, more_bytes, 0, more_rows))
        scales = pad(scales, (0, more_bytes // 8, 0, more_rows))
    return NativeOperand(codes, swizzle_scales(scales).view(torch.float8_e4m3fn), q.global_scale)


def matmul(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """GEMM of stored rows: a [M, K], b [N, K] -> a @ b^T [M, N] in out_dtype."""
    return product(native_operand(a), native_operand(b, _COLUMNS), b.rows, out_dtype, bias)


def product(
    a: NativeOperand, b: NativeOperand, columns: int, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """`matmul` of native operands, cropped to `columns` columns. A bias is added in FP32."""
    through = out_dtype if bias is None else torch.float32
    out = torch.nn.functional.scaled_mm(
        a.codes.view(torch.float4_e2m1fn_x2),
        b.codes.view(torch.float4_e2m1fn_x2).t(),
        [a.scales, a.global_scale],
        _RECIPE,
        [b.scales, b.global_scale],
        _RECIPE,
        _SWIZZLE,
        _SWIZZLE,
        output_dtype=through,
    )[:, :columns]
    return out if bias is None else (out + bias.to(torch.float32)).to(out_dtype)
