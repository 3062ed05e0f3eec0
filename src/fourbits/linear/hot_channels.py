"""Hot channels: the input features with the largest magnitudes, computed without quantization error.

Fprop quantizes all features, and adds back the difference between the unquantized and the quantized product
of the hot ones (arXiv:2602.02047). That is a forward pass whose W and X are exact there, so Dgrad and Wgrad
take the columns of the hot features from unquantized tensors. Plain torch on all devices: the fused kernels
quantize, and GEMMs of few columns follow. docs/nvfp4.md, section 24.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.gemm.matmul import multiply
from fourbits.quant.autocast import without_autocast
from fourbits.quant.quantize import Operand
from fourbits.quant.tensor import ExactOperand, spread


class HotChannels(NamedTuple):
    """The hot features of an input X [M, K]."""

    #: int64 [k], ascending
    index: Tensor
    #: [M, k], in X's dtype
    x: Tensor


def hot_count(share: float, features: int) -> int:
    """How many of a layer's input features are hot: the share, rounded half up."""
    return int(Fraction(str(share)) * features + Fraction(1, 2))


def hottest(x: Tensor, count: int) -> HotChannels:
    """The `count` features of x [M, K] with the largest magnitudes."""
    if x.shape[0] == 0:
        index = torch.arange(count, device=x.device, dtype=torch.int64)
    else:
        index = x.detach().abs().amax(0).topk(count, sorted=False).indices.sort().values
    return HotChannels(index, x[:, index].contiguous())


def fprop(
    lhs: Operand, rhs: Operand, hot: HotChannels, weight: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """q(X) q(W)^T, plus X W^T - q(X) q(W)^T of the hot features, plus bias, rounded once. [M, N]."""
    out = multiply(lhs, rhs, torch.float32)[:, : weight.shape[0]]
    with without_autocast(out):
        exact = hot.x.to(torch.float32) @ weight[:, hot.index].to(torch.float32).t()
        quantized = _columns(lhs, hot.index) @ _columns(rhs, hot.index)[: weight.shape[0]].t()
        out = out + (exact - quantized)
    return (out if bias is None else out + bias.to(torch.float32)).to(out_dtype)


def with_hot_dx(dx: Tensor, dy: Tensor, weight: Tensor, hot: HotChannels) -> Tensor:
    """dX [M, K] with dY W in the columns of the hot features. dy: [M, N], weight: [N, K], unquantized."""
    with without_autocast(dx):
        exact = dy.to(torch.float32) @ weight[:, hot.index].to(torch.float32)
        return dx.index_copy(1, hot.index, exact.to(dx.dtype))


def with_hot_dw(dw: Tensor, dy: Tensor, hot: HotChannels) -> Tensor:
    """dW fp32 [N, K] with dY^T X in the columns of the hot features. dy: [M, N], unquantized."""
    with without_autocast(dw):
        return dw.index_copy(1, hot.index, dy.to(torch.float32).t() @ hot.x.to(torch.float32))


def _columns(operand: Operand, index: Tensor) -> Tensor:
    """The values of an operand along axis 1 at some features, fp32 [R, k]."""
    assert isinstance(operand, ExactOperand), "a table with hot channels multiplies no codes"
    values = operand.values if operand.axis == 1 else operand.values.t()
    scale = operand.scale
    if scale.dim():
        scale = spread(scale, operand.scale_block, values.shape)[:, index]
    return values[:, index].to(torch.float32) * scale
