"""The single entry to GEMMs of quantized operands, which chooses the implementation.

docs/nvfp4.md, section 12.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourbits.gemm import sums as tensor_cores
from fourbits.gemm.arguments import check_arguments
from fourbits.gemm.cpu import matmul as plain
from fourbits.gemm.native import matmul as native
from fourbits.gemm.sums import Epilogue, Sums, check_sums
from fourbits.gemm.traced import flat, graph_matmul
from fourbits.quant.autocast import autocast_disabler, without_autocast
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import Operand, exact
from fourbits.quant.tensor import ExactOperand, QuantizedTensor
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.gemm.kernels.gemms import kernel_gemm, unsupported

#: a GEMM of operands with one memory layout: (a, b, bias) -> out
Gemm = Callable[..., Tensor]


def matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    *,
    sums: Sums = "fp32",
    epilogue: Epilogue = "separate",
    alpha: Tensor | None = None,
) -> Tensor:
    """GEMM of stored rows: a [M, K], b [N, K] -> a @ b^T [M, N] in out_dtype.

    Operands enter exactly; accumulation, both global scales and the bias are FP32. sums: the order of the
    additions is the device's own ("fp32"); or sums are "exact", rounded once to nearest; or those of the
    tensor cores of a chip, to the bit: sm_100 and sm_103 (FP4, MX and FP8 with one scale per tensor), sm_90
    (4-bit and MX operands as BF16), sm_90_fp8. epilogue: (sum * S_a) * S_b, or sum * (S_a * S_b) for
    "product"; alpha: fp32 scalar to multiply the sums by instead, such as TransformerEngine's. Both need sums
    other than fp32. docs/nvfp4.md, sections 12 and 22.

    Raises ValueError if the contraction sizes or transforms of a and b differ, for an out_dtype other than
    bfloat16, float16 and float32, for a bias without exactly one entry per row of b, for tensors on several
    devices, and for operands that the sums do not support.
    """
    check_arguments(a, b, out_dtype, bias, alpha)
    if torch.compiler.is_compiling() and not (bias is not None and bias.requires_grad):
        return _in_graph(*flat(a), *flat(b), out_dtype, bias, sums, epilogue, alpha)
    if sums == "fp32" and epilogue == "separate" and alpha is None:
        return multiply(exact(a), exact(b), out_dtype, bias)
    check_sums(a, b, sums, epilogue, alpha)
    _check_transforms(a.spec, b.spec)
    with without_autocast(a.codes):
        return tensor_cores.matmul(a, b, out_dtype, bias, sums, epilogue, alpha)


_in_graph = graph_matmul(matmul)


def multiply(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [N, K]^T -> [M, N]: on FP4 tensor cores if both are packed, else emulated.

    Raises ValueError for one of each.
    """
    return gemm(a, b, out_dtype, None if bias is None else bias.dtype)(a, b, bias)


def gemm(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    bias: torch.dtype | None,
    sums: Sums = "fp32",
    epilogue: Epilogue = "separate",
) -> Gemm:
    """The GEMM of operands with the specs, shapes and strides of a and b, as a function of (a, b, bias).

    sums other than fp32 need packed operands; GEMMs of unquantized operands have fp32 sums only.
    """
    _check_transforms(a.spec, b.spec)
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        if sums != "fp32":
            modelled = functools.partial(tensor_cores.matmul, sums=sums, epilogue=epilogue)
            return _Plain(modelled, out_dtype, a.codes.device)
        return _Plain(native.matmul, out_dtype, a.codes.device)
    if not (isinstance(a, ExactOperand) and isinstance(b, ExactOperand)):
        raise ValueError(
            f"matmul: both operands must be packed or neither, got {type(a).__name__} and "
            f"{type(b).__name__}. Unpack the packed one."
        )
    if HAS_TRITON and unsupported(a, b) is None:
        return kernel_gemm(a, b, out_dtype, bias)
    return _Plain(plain.matmul, out_dtype, a.values.device)


class _Plain:
    """A GEMM of torch operators, with autocast disabled."""

    def __init__(self, multiply: Callable[..., Tensor], out_dtype: torch.dtype, device: torch.device) -> None:
        self._multiply, self._out_dtype = multiply, out_dtype
        self._no_autocast = autocast_disabler(device)

    def __call__(self, a: Operand, b: Operand, bias: Tensor | None) -> Tensor:
        with self._no_autocast():
            return self._multiply(a, b, self._out_dtype, bias)


def _check_transforms(a: OperandSpec, b: OperandSpec) -> None:
    if a.transform != b.transform:
        raise ValueError(
            f"matmul: a and b must have the same transform, which cancels only then, got {a.transform} and "
            f"{b.transform}. Give both operands the same rht and rht_signs."
        )
