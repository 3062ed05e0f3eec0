"""The product on NVIDIA cards: which operands the fused kernels multiply, and the multiplication.

Both global scales, the bias and the addition to an existing gradient happen in the FP32 epilogue.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourbits.gemm.kernels import fp8_library as matmul_fp8_library
from fourbits.quant.kernels.support import device_blocker
from fourbits.quant.tensor import ExactOperand
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.gemm.kernels import start as kernels

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def why_not_fused(a: ExactOperand, b: ExactOperand) -> str | None:
    """Why the fused kernels do not multiply a and b, or None. Costs microseconds."""
    if reason := device_blocker(a.values.device):
        return reason
    if not (a.spec.block_format.quantized or b.spec.block_format.quantized):
        return "neither operand is quantized"
    types = {a.values.dtype, b.values.dtype}
    if types == {torch.bfloat16} and a.scale.dim() == b.scale.dim() == 0:
        return None
    if len(types) == 1 and a.values.dtype in _FP8 and a.scale.dim() == b.scale.dim() == 2:
        return None
    return f"no kernel multiplies {a.values.dtype} ({a.spec.format}) by {b.values.dtype} ({b.spec.format})"


def matmul(
    a: ExactOperand,
    b: ExactOperand,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """a [M, K] times b [N, K]^T -> [M, N] in out_dtype, whatever the layout each operand is kept in.

    accumulate_into: an existing [M, N] to add the product to, in fp32 before rounding to its dtype; it is
    returned. Raises ValueError with the reason where no kernel multiplies the operands.
    """
    if reason := why_not_fused(a, b):
        raise ValueError(f"matmul: {reason}. Use the emulated product.")
    if a.values.dtype in _FP8 and matmul_fp8_library.takes(a, b):
        return _from_library(a, b, out_dtype, bias, accumulate_into)
    shape = (a.values.shape[1 - a.axis], b.values.shape[1 - b.axis])
    out = accumulate_into
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=a.values.device)
    accumulate = accumulate_into is not None
    if out.numel() == 0:
        return out
    if a.values.dtype in _FP8:
        kernels.matmul_fp8(_stored(a), _stored(b), out, bias, accumulate)
    else:
        kernels.matmul(*_as_kept(a), *_as_kept(b), (a.scale, b.scale), out, bias, accumulate)
    return out


def _from_library(
    a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype, bias: Tensor | None, into: Tensor | None
) -> Tensor:
    """The FP8 product by cuBLAS; a bias and what is added to are added in FP32."""
    if bias is None and into is None and out_dtype in (torch.bfloat16, torch.float32):
        return matmul_fp8_library.matmul(a, b, out_dtype)
    total = matmul_fp8_library.matmul(a, b, torch.float32)
    if bias is not None:
        total = total + bias.to(torch.float32)
    return total.to(out_dtype) if into is None else into.copy_(into.to(torch.float32) + total)


def _as_kept(operand: ExactOperand) -> tuple[Tensor, int]:
    """Values with unit stride along their rows, and the axis of the contraction in them."""
    if operand.values.stride(1) != 1 and operand.values.stride(0) == 1:
        return operand.values.t(), 1 - operand.axis
    return operand.values, operand.axis


def _stored(operand: ExactOperand) -> "kernels.Blocks":
    """An FP8 operand with its contraction last; square blocks summed the other way are copied for it."""
    values = operand.values if operand.axis == 1 else operand.values.t()
    scale = operand.scale if operand.axis == 1 else operand.scale.t()
    return kernels.Blocks(
        values if values.stride(1) == 1 else values.contiguous(), scale, operand.scale_block[0]
    )
