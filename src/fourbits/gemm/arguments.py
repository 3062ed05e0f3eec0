"""Checks of the arguments of `matmul`."""

import torch
from torch import Tensor

from fourbits.quant.tensor import QuantizedTensor

#: dtypes that sums may be rounded to
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_arguments(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, alpha: Tensor | None
) -> None:
    """Raises ValueError for types, devices and shapes that no GEMM has."""
    _check_types(a, b, out_dtype, bias, alpha)
    for name, tensor in (("b", b.codes), ("bias", bias), ("alpha", alpha)):
        if tensor is not None and tensor.device != a.codes.device:
            raise ValueError(
                f"matmul: {name} must be on a's device, {a.codes.device}, got {tensor.device}. Move it there."
            )
    if a.contraction_size != b.contraction_size:
        raise ValueError(
            f"matmul: a and b must have equal contraction sizes, got {a.contraction_size} (axis {a.axis} of "
            f"{a.shape}) and {b.contraction_size} (axis {b.axis} of {b.shape}). Quantize both along the "
            "contraction axis of the GEMM."
        )
    if bias is not None and tuple(bias.shape) != (b.rows,):
        raise ValueError(
            f"matmul: bias must have one entry per stored row of b, [{b.rows}], got {list(bias.shape)}. "
            "Pass the bias of the layer whose weight is b."
        )


def _check_types(a: object, b: object, out_dtype: object, bias: object, alpha: object) -> None:
    """Checks the annotations at run time."""
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, QuantizedTensor):
            raise ValueError(
                f"matmul: {name} must be a QuantizedTensor, got {type(operand).__name__}. Quantize it first."
            )
    for name, tensor in (("bias", bias), ("alpha", alpha)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise ValueError(
                f"matmul: {name} must be a tensor, got {tensor!r}. Use torch.tensor({tensor!r})."
            )
    if out_dtype not in OUT_DTYPES:
        raise ValueError(
            f"matmul: out_dtype must be bfloat16, float16 or float32, got {out_dtype}. "
            "Pass one of these, and cast the result."
        )
