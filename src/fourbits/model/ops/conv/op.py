"""The causal convolution before the SSD scan, with its SiLU: in PyTorch, or by Triton kernels on a GPU.

The kernels replace what torch.compile generates for the shifted multiply-adds (docs/decisions.md, M 14): its
backward pass writes FP32 copies of gradient and input and reads them again for every tap.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.library import custom_op

from fourbits.model.ops.conv import reference
from fourbits.model.ops.inputs import empty_like_each, empty_like_first, unit_stride
from fourbits.operators import OVERLOAD
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.model.ops.conv.kernels import conv_triton as kernels

#: the number of taps of every published model
KERNEL_TAPS = 4


def conv_silu(
    x: Tensor,
    taps: Tensor,
    bias: Tensor,
    documents: Tensor | None,
    widths: tuple[int, ...],
    fused: bool = False,
) -> tuple[Tensor, ...]:
    """SiLU of the causal convolution in FP32, split along C into `widths`.

    fused: round to x's dtype, and use the kernels if there are KERNEL_TAPS taps.
    """
    if not fused or len(taps) != KERNEL_TAPS:
        y = reference.conv_silu(x, taps, bias, documents)
        return (y.to(x.dtype) if fused else y).split(widths, dim=-1)
    parts = zip(x.split(widths, dim=-1), taps.split(widths, dim=-1), bias.split(widths), strict=True)
    return tuple(conv_forward(*part, documents) for part in parts)


@custom_op(f"fourbits::conv_forward.{OVERLOAD}", mutates_args=())
def conv_forward(x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """SiLU of the convolution by a kernel: [B, T, C] in x's dtype, contiguous.

    x: [B, T, C]; taps: fp32 [4, C]; bias: fp32 [C]; documents: int [B, T] or None. FP32 inside.
    """
    return kernels.forward(*_readable(x, taps, bias, documents))


conv_forward.register_fake(empty_like_first)


@custom_op(f"fourbits::conv_backward.{OVERLOAD}", mutates_args=())
def conv_backward(
    dy: Tensor, x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, in its dtype, and of taps and bias, in FP32; all contiguous."""
    return kernels.backward(unit_stride(dy), *_readable(x, taps, bias, documents))


conv_backward.register_fake(lambda dy, x, taps, bias, documents: empty_like_each(x, taps, bias))


def _save_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *conv_backward(dy, *ctx.saved_tensors), None


conv_forward.register_autograd(_gradients, setup_context=_save_inputs)


def _readable(
    x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments in the layout that the kernels read: unit stride along C, contiguous documents."""
    documents = None if documents is None else documents.contiguous()
    return unit_stride(x), unit_stride(taps), unit_stride(bias), documents
