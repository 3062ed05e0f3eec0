"""MS-EDEN: block scales corrected so that nearest rounding becomes unbiased over random rotations.

arXiv:2601.22813. Within a group, one rotation, the elements are rounded to nearest; the group's correction is
<v, v> / <v, q>, applied to its block scales, which are rounded stochastically. docs/nvfp4.md, section 7.7.
"""

import torch
from torch import Tensor

from fourbits.formats.descriptors import E2M1, E4M3
from fourbits.formats.rounding import round_nearest, round_stochastic_32
from fourbits.quant.choice import halving_sum


def corrected(groups: Tensor, encode: Tensor, block_scale: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Block scales that undo the bias of their groups, and the encode multipliers that hold.

    groups: floats, transformed, [G, k, 16, L]: k blocks of 16 in each rotation; encode, block_scale: of the
    uncorrected blocks, fp32 [G, k, L]; words: random 32-bit integers of that shape. Blocks of scale zero stay
    zero and leave the correction; a group with a poisoned block is poisoned whole.
    """
    encode = torch.where(block_scale == 0, 0.0, encode)
    elements = groups.to(torch.float32) * encode[:, :, None]
    whole = _group_sum(elements * elements)
    rounded = _group_sum(elements * round_nearest(elements, E2M1))
    ratio = torch.div(whole, rounded)
    ratio = torch.where((rounded == 0) | ~torch.isfinite(ratio), 1.0, ratio)
    target = (block_scale * ratio[:, None]).clamp_max(E4M3.max_value)
    poisoned = torch.isnan(block_scale).any(dim=1, keepdim=True)
    return torch.where(poisoned, torch.nan, round_stochastic_32(target, words, E4M3)), encode


def _group_sum(terms: Tensor) -> Tensor:
    """The halving tree over the elements of each group: [G, k, 16, L] -> [G, L]."""
    return halving_sum(halving_sum(terms, 1), 1)
