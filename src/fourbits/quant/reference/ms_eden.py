"""MS-EDEN: block scales corrected so that nearest rounding becomes unbiased over random rotations.

arXiv:2601.22813. Within a group, one rotation, the elements are rounded to nearest; the group's correction is
<v, v> / <v, q>, applied to its block scales, which are rounded stochastically. docs/nvfp4.md, section 7.7.
"""

import torch
from torch import Tensor

from fourbits.formats.descriptors import E2M1, E4M3
from fourbits.formats.rounding import round_nearest, round_stochastic_32
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.scale_search import halving_sum
from fourbits.quant.reference.scales import Scales


def corrected_scales(y: Tensor, scales: Scales, words: Tensor, spec: OperandSpec, axis: int) -> Scales:
    """Scales after the correction of MS-EDEN, group by group.

    y: the transformed tensor; words: 32 random bits per block.
    """
    encode = without_underflow(scales.encode, scales.block_scale)
    groups = group_view(y, spec, axis)
    cells = cell_shape(groups)
    sums = products(groups, encode.reshape(cells))
    factor = corrections(*sums, scales.block_scale.reshape(cells))
    block_scale = corrected(scales.block_scale, over_group(factor, cells, encode.shape), words)
    return scales._replace(block_scale=block_scale, encode=encode)


def group_view(y: Tensor, spec: OperandSpec, axis: int) -> Tensor:
    """The groups of y [G, k, 16, L]: G groups of k blocks of 16, L of them side by side for axis 0."""
    count, length = (y.shape[0], y.shape[1]) if axis == 0 else (y.numel(), 1)
    return y.reshape(count // spec.rht, spec.rht // 16, 16, length)


def cell_shape(groups: Tensor) -> tuple[int, int, int]:
    """The blocks of groups [G, k, 16, L] as [G, k, L]: the order of a grid in the layout of the tensor."""
    return groups.shape[0], groups.shape[1], groups.shape[3]


def over_group(factor: Tensor, cells: tuple[int, int, int], grid: torch.Size) -> Tensor:
    """The factor of each group [G, L], repeated for its blocks, as a grid."""
    return factor[:, None].expand(cells).reshape(grid)


def without_underflow(encode: Tensor, block_scale: Tensor) -> Tensor:
    """Encode factors, 0 for blocks of scale zero: these have zero codes and add nothing to the products."""
    return torch.where(block_scale == 0, 0.0, encode)


def products(groups: Tensor, encode: Tensor) -> tuple[Tensor, Tensor]:
    """<v, v> and <v, q>, summed over the blocks of each group but not yet within them: fp32 [G, 16, L].

    groups: floats [G, k, 16, L], as from `group_view`; encode: fp32 [G, k, L], as from `without_underflow`.
    """
    v = (groups.to(torch.float32) * encode[:, :, None]).abs()  # products do not see the sign
    q = round_nearest(v, E2M1)
    return halving_sum(v * v, 1), halving_sum(v * q, 1)


def corrections(v_v: Tensor, v_q: Tensor, block_scale: Tensor) -> Tensor:
    """The factor on the block scales of each group, fp32 [G, L]; NaN where one of its blocks is poisoned.

    v_v, v_q: as from `products`; block_scale: of the uncorrected blocks, fp32 [G, k, L].
    """
    v_v, v_q = halving_sum(v_v, 1), halving_sum(v_q, 1)
    ratio = torch.div(v_v, v_q)
    ratio = torch.where((v_q == 0) | ~torch.isfinite(ratio), 1.0, ratio)
    return torch.where(torch.isnan(block_scale).any(dim=1), torch.nan, ratio)


def corrected(block_scale: Tensor, factor: Tensor, words: Tensor) -> Tensor:
    """block_scale * factor, rounded stochastically. words: random 32-bit integers; all of one shape."""
    target = (block_scale * factor).clamp_max(E4M3.max_value)
    return torch.where(factor != factor, torch.nan, round_stochastic_32(target, words, E4M3))
