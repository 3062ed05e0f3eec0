"""MS-EDEN: block scales corrected so that nearest rounding becomes unbiased over random rotations.

arXiv:2601.22813. Within a group, one rotation, the elements are rounded to nearest; the group's correction is
<v, v> / <v, q>, applied to its block scales, which are rounded stochastically. docs/nvfp4.md, section 7.7.
"""

import torch
from torch import Tensor

from fourbits.formats.descriptors import E2M1, E4M3
from fourbits.formats.rounding import round_nearest, round_stochastic_32
from fourbits.quant.reference.scale_search import halving_sum


def products(groups: Tensor, encode: Tensor) -> tuple[Tensor, Tensor]:
    """<v, v> and <v, q>, summed over the blocks of each group but not yet within them: fp32 [G, 16, L].

    groups: floats, transformed, [G, k, 16, L]: k blocks of 16 in each rotation; encode: fp32 [G, k, L], as
    from `in_force`.
    """
    elements = (groups.to(torch.float32) * encode[:, :, None]).abs()  # products do not see the sign
    rounded = round_nearest(elements, E2M1)
    return halving_sum(elements * elements, 1), halving_sum(elements * rounded, 1)


def corrections(whole: Tensor, rounded: Tensor, block_scale: Tensor) -> Tensor:
    """The factor on the block scales of each group, fp32 [G, L]; NaN where one of its blocks is poisoned.

    whole, rounded: as from `products`; block_scale: of the uncorrected blocks, fp32 [G, k, L].
    """
    whole, rounded = halving_sum(whole, 1), halving_sum(rounded, 1)
    ratio = torch.div(whole, rounded)
    ratio = torch.where((rounded == 0) | ~torch.isfinite(ratio), 1.0, ratio)
    return torch.where(torch.isnan(block_scale).any(dim=1), torch.nan, ratio)


def corrected(block_scale: Tensor, factor: Tensor, words: Tensor) -> Tensor:
    """block_scale * factor, rounded stochastically. words: random 32-bit integers; all of one shape."""
    target = (block_scale * factor).clamp_max(E4M3.max_value)
    return torch.where(factor != factor, torch.nan, round_stochastic_32(target, words, E4M3))


def in_force(encode: Tensor, block_scale: Tensor) -> Tensor:
    """Encode multipliers: blocks of scale zero have zero codes and leave the correction."""
    return torch.where(block_scale == 0, 0.0, encode)
