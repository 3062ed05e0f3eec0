"""The coefficients of error feedback: how later blocks make up for a block's rounding error.

A GEMM reads X through W: rounding errors E of a row of X cost |E W^T|^2 = E H E^T with H = W^T W. Given the
errors of a block b, shifting the later columns r of its span by E_b H_br H_rr^-1 minimizes the cost, as in
GPTQ (arXiv:2210.17323), where the roles of X and W are exchanged. docs/nvfp4.md, section 25.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

#: a coefficient is a whole multiple of 1/64; the largest magnitude of a coefficient and of an error, in units
UNITS, LARGEST = 64, 127
#: the largest scaled value whose error counts whole: rounding to E2M1, up to 6, loses at most 1 of it
FARTHEST = 7.0
#: the unit of a row's errors is the power of two of the row's largest magnitude, but at least 2 to the second
#: number, times 2 to the minus first
UNITS_BELOW, LEAST_EXPONENT = 8, -111
#: columns whose errors are added to those of later groups together
GROUP = 64
_BLOCK = 16
#: share of the mean diagonal of H that is added to it, so that it can be inverted
_DAMPING = 0.01


def span_within(span: int, columns: int) -> int:
    """The columns of a span in a tensor with this many: no more than there are blocks for."""
    return min(span, -(-columns // _BLOCK) * _BLOCK) if columns else span


def in_order(coefficients: Tensor) -> Tensor:
    """The same coefficients [K, span], with memory column by column, as kernels read them."""
    return coefficients.t().contiguous().t()


def feedback_coefficients(weight: Tensor, span: int) -> Tensor:
    """The coefficients of a linear layer's input, for `OperandSpec.error_feedback`: int8 [K, span], where a
    span longer than K has K columns, rounded up to a block.

    weight: [N, K], of any float dtype. Row k has what an error in column k adds to the columns of later
    blocks of its span. Zero where a span's weights are all zero, or not finite. Raises ValueError for a
    weight that is not a matrix, or a span that is not a multiple of 16.
    """
    if weight.dim() != 2 or span < 1 or span % _BLOCK:
        raise ValueError(
            f"feedback_coefficients: needs weight [N, K] and a span that is a multiple of {_BLOCK}, got "
            f"shape {list(weight.shape)}, span {span}. Flatten the weight, or pass the spec's error_feedback."
        )
    return in_order(batched_coefficients(weight[None], span)[0])


def batched_coefficients(weights: Tensor, span: int) -> Tensor:
    """`feedback_coefficients` of several weights of one shape: [L, N, K] -> int8 [L, K, span]."""
    layers, rows, columns = weights.shape
    span = span_within(span, columns)
    missing = -columns % span
    count = (columns + missing) // span
    spans = pad(weights.detach().to(torch.float32), (0, missing)).view(layers, rows, count, span)
    gram = torch.einsum("lnsi,lnsj->lsij", spans, spans).double()
    mean = gram.diagonal(dim1=2, dim2=3).mean(2)[..., None, None]
    usable = (mean > 0) & mean.isfinite()
    identity = torch.eye(span, dtype=torch.float64, device=weights.device)
    gram = torch.where(usable, gram + _DAMPING * mean * identity, identity)
    # H = U U^T with U upper triangular, and T its inverse: H_rb H_rr^-1 = -U_bb T_br, block by block
    upper = torch.linalg.cholesky(gram.flip(2, 3)).flip(2, 3)
    inverse = torch.linalg.solve_triangular(upper, identity.expand_as(upper), upper=True)
    blocks = upper.unflatten(3, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
    diagonal = blocks.diagonal(dim1=2, dim2=4).movedim(-1, 2)
    shares = -(diagonal @ inverse.unflatten(2, (-1, _BLOCK))).flatten(2, 3)
    later = torch.arange(span, dtype=torch.int64, device=weights.device) // _BLOCK
    shares = torch.where(later[None, :] > later[:, None], shares, 0.0)
    whole = (shares * UNITS).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return whole.flatten(1, 2)[:, :columns].contiguous()
