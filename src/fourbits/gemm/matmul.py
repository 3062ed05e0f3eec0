"""The public entry of products: checks that two operands belong together, then multiplies. docs/nvfp4.md,
section 12.
"""

import torch
from torch import Tensor

from fourbits.gemm.cpu import matmul as matmul_emulated
from fourbits.gemm.kernels import launch as matmul_cuda
from fourbits.gemm.native import matmul as matmul_native
from fourbits.quant.operand import OperandSpec
from fourbits.quant.tensor import ExactOperand, QuantizedTensor, unpacked

#: what sums are rounded to
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> Tensor:
    """Stored rows of a times stored rows of b: a [M, K], b [N, K] -> [M, N] in out_dtype.

    Operands enter exactly; sums are FP32; both global scales and the bias are applied in FP32. Raises
    ValueError where the contraction or the transform differ, for another out_dtype than bfloat16, float16 and
    float32, and for a bias that is not one number per row of b.
    """
    _check_types(a, b, out_dtype)
    if a.contraction_size != b.contraction_size:
        raise ValueError(
            f"matmul: contractions differ: a has {a.contraction_size} (axis {a.axis} of {a.shape}), "
            f"b has {b.contraction_size} (axis {b.axis} of {b.shape}). Quantize both along the axis that is "
            "summed over."
        )
    if bias is not None and tuple(bias.shape) != (b.rows,):
        raise ValueError(
            f"matmul: bias must have one entry per stored row of b, [{b.rows}], got {list(bias.shape)}."
        )
    with torch.autocast(a.codes.device.type, enabled=False):
        return matmul_exact(unpacked(a), unpacked(b), out_dtype, bias)


def multiply(
    a: ExactOperand | QuantizedTensor,
    b: ExactOperand | QuantizedTensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The product by FP4 tensor cores of operands in codes, by others of operands in exact form.

    Autocast must be off. Raises ValueError for one of each.
    """
    if isinstance(a, ExactOperand) and isinstance(b, ExactOperand):
        return matmul_exact(a, b, out_dtype, bias)
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        _check_transforms(a.spec, b.spec)
        return matmul_native.matmul(a, b, out_dtype, bias)
    raise ValueError(
        f"matmul: one operand is in codes, the other is not: {type(a).__name__} and {type(b).__name__}. "
        "Unpack it."
    )


def matmul_exact(
    a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """The same on operands in exact form, as the linear layer keeps them; autocast must be off."""
    _check_transforms(a.spec, b.spec)
    if a.values.is_cuda and matmul_cuda.why_not_fused(a, b) is None:
        return matmul_cuda.matmul(a, b, out_dtype, bias)
    return matmul_emulated.matmul(a, b, out_dtype, bias)


def _check_transforms(a: OperandSpec, b: OperandSpec) -> None:
    if a.transform != b.transform:
        raise ValueError(
            f"matmul: transforms differ, so they would not cancel: a has {a.transform}, b has "
            f"{b.transform}. Give both operands of a GEMM the same rht and rht_signs."
        )


def _check_types(a: object, b: object, out_dtype: object) -> None:
    """What annotations say, for callers who do not check them."""
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, QuantizedTensor):
            raise ValueError(
                f"matmul: {name} must be a QuantizedTensor, got {type(operand).__name__}. Quantize it first."
            )
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"matmul: out_dtype must be bfloat16, float16 or float32, got {out_dtype}.")
