"""The single entry to the GEMM kernels, for dequantized operands."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fourbits.gemm.kernels import fp8_library, launch_fp8
from fourbits.gemm.kernels.launch_bf16 import Layout, bf16_gemm
from fourbits.gemm.reference.tensor_core import TensorCore
from fourbits.quant.kernels import support
from fourbits.quant.operand import OperandSpec
from fourbits.quant.tensor import ExactOperand

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Gemm = Callable[[ExactOperand, ExactOperand, Tensor | None], Tensor]


def unsupported(a: ExactOperand, b: ExactOperand) -> str | None:
    """Why no kernel supports the GEMM of a and b, or None."""
    if reason := support.unsupported_device(a.values.device):
        return reason
    if not (a.spec.block_format.quantized or b.spec.block_format.quantized):
        return "neither operand is quantized"
    types = {a.values.dtype, b.values.dtype}
    if types == {torch.bfloat16} and a.scale.dim() == b.scale.dim() == 0:
        return None
    if len(types) == 1 and a.values.dtype in _FP8 and a.scale.dim() == b.scale.dim() == 2:
        return None
    return f"no GEMM kernel for {a.values.dtype} ({a.spec.format}) by {b.values.dtype} ({b.spec.format})"


def is_chain(core: TensorCore, a: OperandSpec, b: OperandSpec, device: torch.device) -> bool:
    """Whether a BF16 GEMM of this device without split-K has the sums of an instruction: Hopper's own has.

    With E4M3 scales all values are normal numbers of BF16, also with several levels of them.
    """
    if core.name != "sm_90-bf16" or device.type != "cuda" or support.unsupported_device(device):
        return False
    of_e4m3 = all(spec.block_format.scale == "e4m3" for spec in (a, b))
    return of_e4m3 and torch.cuda.get_device_capability(device) == (9, 0)


def kernel_gemm(
    a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype, bias: torch.dtype | None, chain: bool = False
) -> Gemm:
    """The plan of a GEMM for operands with the memory layout of a and b, which the kernels support.

    chain: whether to sum BF16 operands in order of K, without split-K.
    """
    if a.values.dtype in _FP8:
        by_library = fp8_library.unsupported(a, b) is None
        return functools.partial(_fp8, out_dtype=out_dtype, by_library=by_library)
    left, right = _layout(a), _layout(b)
    return _Bf16(bf16_gemm(left, right, out_dtype, bias, a.values.device, chain), a, b, out_dtype, chain)


class _Bf16:
    """A GEMM of BF16 operands, planned for the memory layout of a and b."""

    __slots__ = ("_chain", "_lie", "_multiply", "_out_dtype")

    def __init__(
        self,
        multiply: Callable[..., Tensor],
        a: ExactOperand,
        b: ExactOperand,
        out_dtype: torch.dtype,
        chain: bool,
    ) -> None:
        self._multiply, self._out_dtype, self._chain = multiply, out_dtype, chain
        self._lie = a.values.stride(), a.axis, b.values.stride(), b.axis

    def __call__(self, a: ExactOperand, b: ExactOperand, bias: Tensor | None) -> Tensor:
        if (
            a.values.stride(),
            a.axis,
            b.values.stride(),
            b.axis,
        ) != self._lie:  # the compiler may have changed layouts
            dtype = None if bias is None else bias.dtype
            return kernel_gemm(a, b, self._out_dtype, dtype, self._chain)(a, b, bias)
        return self._multiply(_rows(a.values), _rows(b.values), a.scale, b.scale, bias)


def _rows(values: Tensor) -> Tensor:
    """The values, or their transpose, with unit stride along rows."""
    if values.stride(1) == 1:
        return values
    return values.t() if values.stride(0) == 1 else values.contiguous()


def _layout(operand: ExactOperand) -> Layout:
    """The memory layout of the operand's values, as `_rows` returns them."""
    values, axis = operand.values, operand.axis
    rows = _rows(values)
    if values.stride(1) != 1 and values.stride(0) == 1:
        axis = 1 - axis
    return Layout((rows.shape[0], rows.shape[1]), rows.stride(0), axis, rows.data_ptr() % 16 == 0)


def _fp8(
    a: ExactOperand, b: ExactOperand, bias: Tensor | None, *, out_dtype: torch.dtype, by_library: bool
) -> Tensor:
    if not by_library:
        return launch_fp8.matmul(a, b, out_dtype, bias)
    if bias is None and out_dtype in (torch.bfloat16, torch.float32):
        return fp8_library.matmul(a, b, out_dtype)
    total = fp8_library.matmul(a, b, torch.float32)
    return (total if bias is None else total + bias.to(torch.float32)).to(out_dtype)
