"""Output gradients in which a few tokens are far larger than all others: gradient_rows: limited.

Rows of dY above 16 times the typical row (in powers of two) are scaled down to that by a power of two
before dY is quantized, so that one scale per tensor, and one rotation of 16 tokens, fits all others. Dgrad's
result is scaled back exactly, row by row. Wgrad sums over rows, so its result cannot be scaled back: such a
token counts less there, as if gradients were clipped per token. docs/nvfp4.md, section 19.
"""

import torch
from torch import Tensor

#: how far above the typical row a row may be, as an exponent of two
HEADROOM = 4


def limited(dy: Tensor) -> tuple[Tensor, Tensor]:
    """dY with its large rows scaled down, and the factors to scale rows of dX back: [M, N], [M, 1] fp32.

    Both factors are powers of two, so that only underflow could round. Rows that are zero or not finite are
    not scaled.
    """
    amax = dy.detach().abs().amax(1, keepdim=True).float()
    usual = (amax > 0) & amax.isfinite()
    exponent = torch.where(usual, torch.frexp(amax).exponent, 0)
    typical = exponent.sum() // usual.sum().clamp(min=1)
    excess = torch.where(usual, (exponent - typical - HEADROOM).clamp(min=0), 0)
    back = torch.ldexp(torch.ones_like(amax), excess.to(amax.dtype))  # else in the default dtype
    return (dy / back).to(dy.dtype), back
