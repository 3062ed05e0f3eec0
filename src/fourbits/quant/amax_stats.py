"""Amax stats of an operand before it is quantized. docs/nvfp4.md, sections 16 and 17.

Its own amax, how many blocks a given amax saturates, and the counts that choose an adaptive layout.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.formats.descriptors import E4M3
from fourbits.formats.rounding import round_nearest
from fourbits.quant.cpu import quantize as cpu
from fourbits.quant.cpu.compiled import runner_for, worth_compiling
from fourbits.quant.cpu.stages import for_scales
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference import quantize as reference
from fourbits.quant.reference.blocks import (
    block_view,
    coarser_maxima,
    completed,
    finer,
    grid_shape,
    in_layout,
)
from fourbits.quant.reference.elements import element_of
from fourbits.quant.reference.philox import as_sr_key
from fourbits.quant.reference.scales import encode_scale_of, target_and_kappa
from fourbits.quant.scale_codes import SCALE_FORMATS

#: the blocks that layout statistics count
_ROWS = OperandSpec(block=(1, 16), scale_bound=448)
_SMALLEST_NORMAL_SCALE = 2.0**-6


class OwnAmax(NamedTuple):
    """The amaxes and counts of an operand with an amax policy."""

    #: fp32 scalar: the amax to quantize with
    used: Tensor
    #: fp32 scalar: the operand's own
    own: Tensor
    #: int64 [2]: saturated and all blocks; elements instead for a block of the whole tensor
    counts: Tensor


def own_amax(x: Tensor, spec: OperandSpec, axis: int, given: Tensor, sr_key: Tensor | None) -> OwnAmax:
    """Measure an operand before it is quantized. x, spec, axis and sr_key as for `quantize`; axis 0 or 1.

    given: fp32 scalar, the amax to use; negative for the operand's own.
    """
    blocks = block_view(completed(_source_of(x, spec, axis, sr_key), spec, axis), spec, axis)
    return OwnAmax(*runner_for(x)(_measured)(blocks, given, for_scales(spec)))


def largest_magnitude(x: Tensor, spec: OperandSpec, axis: int, sr_key: Tensor | None) -> Tensor:
    """The operand's own amax, fp32 scalar; 0 for a format without one. Arguments as for `own_amax`."""
    source = _source_of(x, spec, axis, sr_key) if spec.tensor_scaled and x.numel() else x.new_zeros(1)
    return source.abs().amax().to(torch.float32)


def layout_counts(x: Tensor, spec: OperandSpec, axis: int, kind: str, sr_key: Tensor | None) -> Tensor:
    """int64 [2]: all counted, and those in favour of the alternative layout; additive over tensors.

    x, spec, axis (0 or 1) and sr_key as for `quantize`. kind: `outer` counts 1x16 blocks, and those with a
    subnormal or zero scale; `block` counts rows of 16x16 blocks, and those two octaves below their block.
    """
    y = _source_of(x, spec, axis, sr_key)
    maxima = torch.zeros(grid_shape(y, _ROWS, axis), device=x.device, dtype=torch.float32)
    if y.numel():
        blocks = block_view(y, _ROWS, axis)
        maxima = blocks.abs().amax(dim=(1, 3)).to(torch.float32).reshape(maxima.shape)
    counted, other = _OUTLIERS[kind](maxima, axis)
    return torch.stack((counted.sum(), (counted & other).sum()))


def _source_of(x: Tensor, spec: OperandSpec, axis: int, sr_key: Tensor | None) -> Tensor:
    """The source tensor to quantize, in the layout of x."""
    key = None if sr_key is None else as_sr_key(sr_key)
    return (cpu if worth_compiling(x) else reference).source_of(x, spec, axis, key)


def _measured(blocks: Tensor, given: Tensor, spec: OperandSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of OwnAmax. blocks: [A, a, B, b]."""
    block_amax = given.new_zeros((1, 1))
    if blocks.numel():
        block_amax = blocks.abs().amax(dim=(1, 3)).to(torch.float32)
    own = block_amax.amax()
    used = torch.where(given < 0, own, given)
    target, kappa = target_and_kappa(spec)
    encode = encode_scale_of(target, used, spec)
    if spec.block_size is None:
        saturated = blocks.to(torch.float32).abs() * encode > element_of(spec).saturation_limit
    else:
        limit = SCALE_FORMATS[spec.block_format.scale or ""].saturation_limit
        saturated = block_amax * (encode * kappa) > limit
    total = torch.full((), saturated.numel() if blocks.numel() else 0, device=given.device, dtype=torch.int64)
    return used, own, torch.stack((saturated.sum(), total))


def _subnormal_scales(maxima: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Masks of nonzero blocks, and of blocks with a subnormal or zero scale."""
    amax = maxima.amax() if maxima.numel() else maxima.new_zeros(())
    target, kappa = target_and_kappa(_ROWS)
    scales = maxima * (encode_scale_of(target, amax, _ROWS) * kappa)
    return maxima > 0, round_nearest(scales.clamp_max(448.0), E4M3) < _SMALLEST_NORMAL_SCALE


def _low_rows(maxima: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Masks of rows of nonzero 16x16 blocks, and of rows two octaves below the maximum of their block."""
    square = in_layout((16, 1), axis)
    assert square is not None
    of_square = finer(coarser_maxima(maxima, square), square, maxima.shape)
    return of_square > 0, 4.0 * maxima < of_square


_OUTLIERS = {"outer": _subnormal_scales, "block": _low_rows}
