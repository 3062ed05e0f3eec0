"""The public entry of products: checks that two operands belong together, then multiplies. docs/nvfp4.md,
section 12.
"""

import torch
from torch import Tensor

from fourbits.gemm import matmul_cuda, matmul_emulated
from fourbits.quant.tensor import ExactOperand, QuantizedTensor, unpacked


def matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> Tensor:
    """Stored rows of a times stored rows of b: a [M, K], b [N, K] -> [M, N] in out_dtype.

    Operands enter exactly; sums are FP32; both global scales and the bias are applied in FP32. Raises
    ValueError where the contraction or the transform differ.
    """
    if a.contraction_size != b.contraction_size:
        raise ValueError(
            f"matmul: contractions differ: a has {a.contraction_size} (axis {a.axis} of {a.shape}), "
            f"b has {b.contraction_size} (axis {b.axis} of {b.shape}). Quantize both along the axis that is "
            "summed over."
        )
    with torch.autocast(a.codes.device.type, enabled=False):
        return matmul_exact(unpacked(a), unpacked(b), out_dtype, bias)


def matmul_exact(
    a: ExactOperand, b: ExactOperand, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """The same on operands in exact form, as the linear layer keeps them; autocast must be off."""
    if a.spec.transform != b.spec.transform:
        raise ValueError(
            f"matmul: transforms differ, so they would not cancel: a has {a.spec.transform}, b has "
            f"{b.spec.transform}. Give both operands of a GEMM the same rht and rht_signs."
        )
    if a.values.is_cuda and matmul_cuda.why_not_fused(a, b) is None:
        return matmul_cuda.matmul(a, b, out_dtype, bias)
    return matmul_emulated.matmul(a, b, out_dtype, bias)
