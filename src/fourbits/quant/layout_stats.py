"""Statistics by which an operand chooses its blocks. docs/nvfp4.md, section 17."""

import torch
from torch import Tensor

from fourbits.formats.descriptors import E4M3
from fourbits.formats.rounding import round_nearest
from fourbits.quant.amax_stats import prepared
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.blocks import block_view, coarser_maxima, finer, grid_shape, in_layout
from fourbits.quant.reference.scales import encode_scale_of, target_and_kappa

_ROWS = OperandSpec(block=(1, 16), scale_bound=448)
_SMALLEST_NORMAL_SCALE = 2.0**-6


def layout_counts(x: Tensor, spec: OperandSpec, axis: int, kind: str, sr_key: Tensor | None) -> Tensor:
    """int64 [2]: all, and those that speak for the layout that is not the spec's own; adds up over tensors.

    x, spec, axis (0 or 1) and sr_key as for `quantize`. kind: `outer` counts 1x16 blocks and those among them
    with a subnormal or zero scale, `block` rows of 16x16 blocks and those two octaves below their block.
    """
    ready = prepared(x, spec, axis, sr_key)
    maxima = torch.zeros(grid_shape(ready, _ROWS, axis), device=x.device)
    if ready.numel():
        blocks = block_view(ready, _ROWS, axis)
        maxima = blocks.abs().amax(dim=(1, 3)).to(torch.float32).reshape(maxima.shape)
    every, other = _OUTLIERS[kind](maxima, axis)
    return torch.stack((every.sum(), (every & other).sum()))


def _subnormal_scales(maxima: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    amax = maxima.amax() if maxima.numel() else maxima.new_zeros(())
    target, kappa = target_and_kappa(_ROWS)
    scales = maxima * (encode_scale_of(target, amax, _ROWS) * kappa)
    return maxima > 0, round_nearest(scales.clamp_max(448.0), E4M3) < _SMALLEST_NORMAL_SCALE


def _low_rows(maxima: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    tile = in_layout((16, 1), axis)
    assert tile is not None
    of_tile = finer(coarser_maxima(maxima, tile), tile, maxima.shape)
    return of_tile > 0, 4.0 * maxima < of_tile


_OUTLIERS = {"outer": _subnormal_scales, "block": _low_rows}
