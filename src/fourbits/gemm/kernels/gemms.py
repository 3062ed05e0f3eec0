"""The single entry to the GEMM kernels, for dequantized operands."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fourbits.gemm.kernels import fp8_library, launch_fp8
from fourbits.gemm.kernels.bias import readable
from fourbits.gemm.kernels.launch_bf16 import OperandLayout, bf16_gemm
from fourbits.quant.kernels.support import unsupported_device
from fourbits.quant.tensor import ExactOperand

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Gemm = Callable[[ExactOperand, ExactOperand, Tensor | None], Tensor]


def unsupported(a: ExactOperand, b: ExactOperand) -> str | None:
    """Why no kernel supports the GEMM of a and b, or None."""
    if reason := unsupported_device(a.values.device):
        return reason
    if not (a.spec.block_format.quantized or b.spec.block_format.quantized):
        return "neither operand is quantized"
    types = {a.values.dtype, b.values.dtype}
    if types == {torch.bfloat16} and a.scale.dim() == b.scale.dim() == 0:
        return None
    if len(types) == 1 and a.values.dtype in _FP8 and a.scale.dim() == b.scale.dim() == 2:
        return None
    return f"no GEMM kernel for {a.values.dtype} ({a.spec.format}) by {b.values.dtype} ({b.spec.format})"


def kernel_gemm(a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype, bias: torch.dtype | None) -> Gemm:
    """The GEMM of operands with the memory layout of a and b, which the kernels support."""
    if a.values.dtype in _FP8:
        by_library = fp8_library.unsupported(a, b) is None
        return functools.partial(_fp8, out_dtype=out_dtype, by_library=by_library)
    left, right = _layout(a), _layout(b)
    return _Bf16(bf16_gemm(left, right, out_dtype, bias, a.values.device), a, b, out_dtype)


class _Bf16:
    """A GEMM of BF16 operands with the memory layout of a and b."""

    __slots__ = ("_lie", "_multiply", "_out_dtype")

    def __init__(
        self, multiply: Callable[..., Tensor], a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype
    ) -> None:
        self._multiply, self._out_dtype = multiply, out_dtype
        self._lie = a.values.stride(), a.axis, b.values.stride(), b.axis

    def __call__(self, a: ExactOperand, b: ExactOperand, bias: Tensor | None) -> Tensor:
        if (
            a.values.stride(),
            a.axis,
            b.values.stride(),
            b.axis,
        ) != self._lie:  # the compiler may have changed layouts
            return kernel_gemm(a, b, self._out_dtype, None if bias is None else bias.dtype)(a, b, bias)
        bias = readable(bias, a.values.device)
        return self._multiply(_rows(a.values), _rows(b.values), a.scale, b.scale, bias)


def _rows(values: Tensor) -> Tensor:
    """The values, or their transpose, with unit stride along rows."""
    if values.stride(1) == 1:
        return values
    return values.t() if values.stride(0) == 1 else values.contiguous()


def _layout(operand: ExactOperand) -> OperandLayout:
    """The memory layout of the operand's values, as `_rows` returns them."""
    values, axis = operand.values, operand.axis
    rows = _rows(values)
    if values.stride(1) != 1 and values.stride(0) == 1:
        axis = 1 - axis
    return OperandLayout((rows.shape[0], rows.shape[1]), rows.stride(0), axis, rows.data_ptr() % 16 == 0)


def _fp8(
    a: ExactOperand, b: ExactOperand, bias: Tensor | None, *, out_dtype: torch.dtype, by_library: bool
) -> Tensor:
    if not by_library:
        return launch_fp8.matmul(a, b, out_dtype, readable(bias, a.values.device))
    if bias is None and out_dtype in (torch.bfloat16, torch.float32):
        return fp8_library.matmul(a, b, out_dtype)
    total = fp8_library.matmul(a, b, torch.float32)
    return (total if bias is None else total + bias.to(torch.float32)).to(out_dtype)
