"""Checks of the arguments of `quantize` and its relatives."""

import torch
from torch import Tensor

from fourbits.quant.feedback_coefficients import span_within
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.philox import as_sr_key
from fourbits.quant.request import draws

#: dtypes of tensors that can be quantized
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checked_inputs(
    x: Tensor,
    spec: OperandSpec,
    axis: int,
    amax: Tensor | None,
    sr_key: Tensor | None,
    coefficients: Tensor | None = None,
) -> tuple[int, Tensor | None, Tensor | None]:
    """(axis 0 or 1, amax fp32 scalar, key int64 [5]) on x's device. Raises ValueError for anything else."""
    _check_types(x, spec, axis, amax)
    if x.dim() != 2:
        raise ValueError(f"quantize: x must be 2-D, got shape {list(x.shape)}. Flatten x first.")
    check_dtype(x.dtype)
    if spec.correction:
        raise ValueError(
            f"quantize: a correction is added back by a linear layer only, got {spec.correction!r}. Pass the "
            "residual and spec.of_residual."
        )
    _check_coefficients(x, spec, axis % 2, coefficients)
    if amax is not None:
        if not spec.tensor_scaled:
            raise ValueError(
                f"quantize: {spec.format} has no scale of the whole tensor, so it takes no amax. "
                "Remove the argument."
            )
        amax = (
            amax
            if amax.dtype == torch.float32 and amax.device == x.device
            else amax.to(x.device, torch.float32)
        )
    if spec.stochastic and sr_key is None:
        raise ValueError(
            f"quantize: rounding={spec.rounding!r}, scale_rounding={spec.scale_rounding!r} needs sr_key, "
            "the seed and counter of its random bits."
        )
    if spec.block_format.quantized and draws(spec) and sr_key is None:
        raise ValueError(
            f"OperandSpec.rht_signs={spec.signs!r} needs sr_key, which names the layer and the step."
        )
    key = None if sr_key is None else as_sr_key(sr_key).to(x.device)
    return axis % 2, amax, key


def _check_coefficients(x: Tensor, spec: OperandSpec, axis: int, coefficients: Tensor | None) -> None:
    """Raises ValueError unless coefficients are there where the spec has error feedback, and fit."""
    if not spec.error_feedback:
        if coefficients is not None:
            raise ValueError(
                "quantize: coefficients are for specs with error_feedback, which this one lacks. Remove them."
            )
        return
    if axis != 1:
        raise ValueError(
            "quantize: error feedback runs along the rows of a tensor, got axis 0. Quantize along axis 1."
        )
    expected = (x.shape[1], span_within(spec.error_feedback, x.shape[1]))
    got = coefficients if coefficients is None else f"{coefficients.dtype} {list(coefficients.shape)}"
    if coefficients is None or not (
        tuple(coefficients.shape) == expected
        and coefficients.dtype == torch.int8
        and coefficients.device == x.device
    ):
        raise ValueError(
            f"quantize: error feedback needs coefficients int8 {list(expected)} on {x.device}, got {got}. "
            "Compute them from the layer's weight: fourbits.feedback_coefficients(weight, span)."
        )


def check_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError for a dtype that cannot be quantized."""
    if dtype not in DTYPES:
        raise ValueError(f"quantize: x must be float32, bfloat16 or float16, got {dtype}. Cast it first.")


def _check_types(x: object, spec: object, axis: object, amax: object) -> None:
    """Checks of annotated types, for callers who do not run a type checker."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        got = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"quantize: x must be a dense tensor, got {got}. Convert it first.")
    if not isinstance(spec, OperandSpec):
        raise ValueError(
            f"quantize: spec must be an OperandSpec, got {spec!r}. Write OperandSpec(format=...)."
        )
    if not isinstance(axis, int) or axis not in (-2, -1, 0, 1):
        raise ValueError(
            f"quantize: axis must be 0 or 1 (or -2, -1), the one that the GEMM sums over, got {axis!r}. "
            "Pass the axis whose length is K."
        )
    if amax is not None and not (isinstance(amax, Tensor) and amax.numel() == 1):
        got = list(amax.shape) if isinstance(amax, Tensor) else repr(amax)
        raise ValueError(
            f"quantize: amax must be a tensor of one number, got {got}. Write torch.tensor(3.0)."
        )
