"""Quantize and dequantize in one step, with a gradient: for users who write their own layers.

Rounding has no useful derivative. The straight-through estimator takes that of the identity, so the gradient
of the result is the gradient of x. docs/nvfp4.md, section 6.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from fourbits.func_transforms import UnsupportedTransformError, under_torch_func
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import fake_quantized, quantized_and_back
from fourbits.quant.traced import spec_to_text


def fake_quantize(
    x: Tensor, spec: OperandSpec, axis: int = -1, amax: Tensor | None = None, sr_key: Tensor | None = None
) -> Tensor:
    """x as quantization leaves it: the bytes of `quantize(x, spec, axis).dequantize(x.dtype)`.

    Arguments as for `quantize`. The gradient passes to x unchanged (straight-through), and none to amax.
    Raises ValueError for the inputs that `quantize` refuses, and for a spec with a transform; under
    torch.func, which differentiates it too, UnsupportedTransformError for vmap.
    """
    if isinstance(spec, OperandSpec) and spec.rht:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"fake_quantize: spec.rht must be 0, got {spec.rht}: the result would be a rotated tensor. "
            "Write replace(spec, rht=0), or multiply what quantize returns by matmul: there rotations cancel."
        )
    if torch.compiler.is_compiling():
        return fake_quantized(x, spec_to_text(spec), axis, amax, sr_key)
    function = _UnderTorchFunc if under_torch_func() else _StraightThrough
    return function.apply(x, spec, axis, amax, sr_key)  # pyright: ignore[reportReturnType]


class _StraightThrough(torch.autograd.Function):
    """Quantizes and dequantizes forward, and passes the gradient on backward. Graphs have an operator for it,
    because torch 2.11 compiles an autograd.Function that passes its gradient on to a gradient of zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, sr_key: Tensor | None
    ) -> Tensor:
        del ctx
        return quantized_and_back(x, spec, axis, amax, sr_key)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        del ctx
        return grad, None, None, None, None


class _UnderTorchFunc(_StraightThrough):
    """The same in the form that torch.func requires, which inspects a signature at every call."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor, spec: OperandSpec, axis: int, amax: Tensor | None, sr_key: Tensor | None
    ) -> Tensor:
        return quantized_and_back(x, spec, axis, amax, sr_key).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tangent of x, in a separate tensor, as torch requires."""
        del ctx
        return tangent.clone()

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        """Raises UnsupportedTransformError."""
        raise UnsupportedTransformError(
            "fake_quantize: torch.func.vmap is not supported, because all rows of a call share one scale. "
            "Call it on one tensor after the other."
        )
