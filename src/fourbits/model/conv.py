"""The causal convolution before the scan, with its SiLU: as torch, which the compiler fuses, and by kernels.

On a card kernels replace what the compiler makes of the shifted multiply-adds (docs/decisions.md, M 14):
backwards it writes FP32 copies of gradient and input and reads them again for every tap.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

from fourbits.model.documents import same_as_before
from fourbits.model.fp32 import at_least_fp32
from fourbits.model.layout import by_rows
from fourbits.triton_version import HAS_TRITON

if TYPE_CHECKING or HAS_TRITON:
    from fourbits.model import conv_triton as kernels

#: of the models whose weights there are
KERNEL_TAPS = 4


def causal_conv(x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None = None) -> Tensor:
    """Depthwise, over a token and the W-1 before it, of its document if given.

    x: [B, T, C], taps: [W, C], bias: [C], documents: int [B, T] or None -> [B, T, C].
    """
    y = bias
    # W shifted multiply-adds, because they fuse with what stands before and behind; a convolution would not.
    for back, tap in enumerate(taps.flip(0)):
        term = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] * tap
        if documents is not None and back:
            term = term * same_as_before(documents, back)[..., None]
        y = y + term
    return y


def conv_silu(
    x: Tensor,
    taps: Tensor,
    bias: Tensor,
    documents: Tensor | None,
    widths: tuple[int, ...],
    fused: bool = False,
) -> tuple[Tensor, ...]:
    """SiLU of `causal_conv` in FP32, cut along C into `widths`.

    fused: rounded to x's dtype, and by kernels where there are as many taps as these know.
    """
    if not fused or len(taps) != KERNEL_TAPS:
        y = F.silu(causal_conv(at_least_fp32(x), taps, bias, documents))
        return (y.to(x.dtype) if fused else y).split(widths, dim=-1)
    parts = zip(x.split(widths, dim=-1), taps.split(widths, dim=-1), bias.split(widths), strict=True)
    return tuple(conv_forward(*part, documents) for part in parts)


@custom_op("fourbits::conv_forward", mutates_args=())
def conv_forward(x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    """SiLU of the convolution by a kernel: [B, T, C] in x's dtype, contiguous.

    x: [B, T, C]; taps: fp32 [4, C]; bias: fp32 [C]; documents: int [B, T] or None. FP32 inside.
    """
    return kernels.forward(*_readable(x, taps, bias, documents))


@conv_forward.register_fake
def _(x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("fourbits::conv_backward", mutates_args=())
def conv_backward(
    dy: Tensor, x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, in its dtype, and of taps and bias, in FP32, contiguous."""
    return kernels.backward(by_rows(dy), *_readable(x, taps, bias, documents))


@conv_backward.register_fake
def _(
    dy: Tensor, x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), taps.new_empty(taps.shape), bias.new_empty(bias.shape)


def _keep(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *conv_backward(dy, *ctx.saved_tensors), None


conv_forward.register_autograd(_gradients, setup_context=_keep)


def _readable(
    x: Tensor, taps: Tensor, bias: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments as the kernels read them: channels side by side, documents without gaps."""
    return by_rows(x), by_rows(taps), by_rows(bias), None if documents is None else documents.contiguous()
