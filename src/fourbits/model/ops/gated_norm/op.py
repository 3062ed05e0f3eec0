"""The gated norm after the SSD scan: in PyTorch, which the compiler fuses, or by Triton kernels on a GPU."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.library import custom_op

from fourbits.model.ops.gated_norm import reference
from fourbits.model.ops.inputs import empty_like_each, empty_like_first, unit_stride
from fourbits.operators import OVERLOAD
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.model.ops.gated_norm.kernels import gated_norm_triton as kernels


def gated_group_norm(
    y: Tensor, z: Tensor, weight: Tensor, num_groups: int, eps: float, fused: bool = False
) -> Tensor:
    """RMS norm of y * silu(z) over each of num_groups equal parts of the last axis, times a gain; FP32.

    y, z: [B, T, M]; weight: fp32 [M]. fused: use the kernels, and round to y's dtype; z may be a slice.
    """
    if fused:
        return gated_norm_forward(y, z, weight, num_groups, eps)
    return reference.gated_group_norm(y, z, weight, num_groups, eps)


@custom_op(f"fourbits::gated_norm_forward.{OVERLOAD}", mutates_args=())
def gated_norm_forward(y: Tensor, z: Tensor, weight: Tensor, num_groups: int, eps: float) -> Tensor:
    """The gated norm by a kernel: [B, T, M] in y's dtype, contiguous. Arguments: see `gated_group_norm`."""
    return kernels.forward(*_readable(y, z, weight), num_groups, eps)


gated_norm_forward.register_fake(empty_like_first)


@custom_op(f"fourbits::gated_norm_backward.{OVERLOAD}", mutates_args=())
def gated_norm_backward(
    dout: Tensor, y: Tensor, z: Tensor, weight: Tensor, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y and z, in their dtypes, and of the gain, in FP32; all contiguous."""
    return kernels.backward(dout.contiguous(), *_readable(y, z, weight), num_groups, eps)


gated_norm_backward.register_fake(lambda dout, y, z, weight, num_groups, eps: empty_like_each(y, z, weight))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, z, weight, ctx.num_groups, ctx.eps = inputs
    ctx.save_for_backward(y, z, weight)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return *gated_norm_backward(dout, *ctx.saved_tensors, ctx.num_groups, ctx.eps), None, None


gated_norm_forward.register_autograd(_gradients, setup_context=_save_inputs)


def _readable(y: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments in the layout that the kernels read: contiguous, but z may have gaps between tokens."""
    return y.contiguous(), unit_stride(z), weight.contiguous()
