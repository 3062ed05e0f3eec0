"""GEMMs of corrected operands: the residuals' GEMM plus the removed parts' product, added in FP32.

docs/nvfp4.md, section 21.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.gemm.matmul import multiply
from fourbits.quant.autocast import without_autocast
from fourbits.quant.correction import Correction
from fourbits.quant.quantize import Operand, exact
from fourbits.quant.tensor import QuantizedTensor


class Corrected(NamedTuple):
    """The operand quantized from a correction's residual, and the part that was removed."""

    operand: Operand
    #: fp32, as from `Correction.split`
    removed: Tensor
    correction: Correction


#: the operands quantized from one tensor
Operands = tuple[Operand | Corrected, ...]


def row_gemm(a: Corrected, b: Operand, weight: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """a b^T + P(T) weight^T + bias, rounded once. weight: [N, F], from which b was quantized."""
    out = multiply(a.operand, b, torch.float32)[:, : weight.shape[0]]  # the other columns are padding
    with without_autocast(out):
        out = out + a.correction.product(a.removed, weight.to(torch.float32), out.shape[0])
    return (out if bias is None else out + bias.to(torch.float32)).to(out_dtype)


def wgrad_gemm(a: Operand | Corrected, b: Operand | Corrected, tokens: int) -> Tensor:
    """dW, fp32 [N, K]: the residuals' GEMM plus P(dY)^T P(X); the cross terms are zero."""
    assert isinstance(a, Corrected)
    assert isinstance(b, Corrected), "a table gives both operands of Wgrad one correction"
    out = multiply(_exact(a.operand), _exact(b.operand), torch.float32)
    with without_autocast(out):
        return out + a.correction.outer_product(a.removed, b.removed, tokens)


def _exact(operand: Operand) -> Operand:
    return exact(operand) if isinstance(operand, QuantizedTensor) else operand
