"""The specification of quantization, in plain torch: readable aloud, bit-exact, on any device.

The same source under torch.compile is the CPU path (`compiled.py`); other backends must give equal bytes.
Everything works in the layout of the tensor, so that no step transposes: `axis` says along which axis blocks
run. docs/nvfp4.md has the rules.
"""

import torch
from torch import Tensor

from fourbits.formats.codes import grid_codes
from fourbits.formats.descriptors import FloatFormat
from fourbits.formats.rounding import round_nearest, round_stochastic, round_stochastic_32
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.scales import (
    SIMPLE_SCALES,
    Scales,
    level_of,
    max_target,
    poisoned,
    two_level_scales,
)


def measured(
    blocks: Tensor, amax: Tensor | None, words: Tensor | None, spec: OperandSpec, axis: int
) -> Scales:
    """Scales of every block [A, a, B, b] of a completed tensor; the other arguments as for `scales_of`."""
    return scales_of(block_maxima(blocks), amax, None, words, spec, axis)


def block_maxima(blocks: Tensor) -> Tensor:
    """Largest magnitude of every block, NaN where one is in it. [A, a, B, b] -> fp32 [A, B]."""
    if not blocks.numel():
        return torch.zeros(blocks.shape[::2], dtype=torch.float32, device=blocks.device)
    return blocks.to(torch.float32).abs().amax(dim=(1, 3))


def lane_maxima(lanes: Tensor) -> Tensor:
    """The same from blocks as `block_lanes` has them, which is faster: [A, a, b, B] -> fp32 [A, B]."""
    return lanes.to(torch.float32).abs().amax(dim=(1, 2))


def scales_of(
    block_amax: Tensor,
    amax: Tensor | None,
    wanted: Tensor | None,
    words: Tensor | None,
    spec: OperandSpec,
    axis: int,
) -> Scales:
    """Scales of every block.

    block_amax: fp32 grid in layout; amax: fp32 scalar, None for the tensor's own; wanted: unrounded block
    scales, where a rule has compared errors; words: 32 random bits per block, for stochastic block scales.
    """
    level, stored = level_of(block_amax, amax, spec, axis)
    kind = spec.block_format.scale or ""
    if kind in SIMPLE_SCALES:
        scales = SIMPLE_SCALES[kind](block_amax, level, spec)
    else:
        target = max_target(block_amax, level, spec) if wanted is None else wanted
        scales = two_level_scales(target, level, spec, words)
    return poisoned(scales, block_amax, level)._replace(global_scale=stored)


def element_codes(
    blocks: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> Tensor:
    """Codes of the rounded elements, uint8, one per element.

    blocks: floats [A, a, B, b]; encode, block_scale: grids [A, B], see Scales; noise: random integers in the
    shape of blocks, for stochastic rounding.
    """
    values, scale, magnitude = _elements(blocks, encode, block_scale, noise, spec)
    return grid_codes(_poison(magnitude, scale, spec), _number(values), _element(spec))


def exact_values(
    blocks: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> Tensor:
    """Values of an exact operand, bf16: element * block scale, or the element under fp32 scales.

    Arguments as for `element_codes`. A zero has the sign of the input.
    """
    values, scale, magnitude = _elements(blocks, encode, block_scale, noise, spec)
    if spec.block_format.scale == "fp32":
        magnitude, values = _poison(magnitude, scale, spec), _number(values)
    else:
        magnitude = magnitude * scale
    return torch.copysign(magnitude, values).to(torch.bfloat16)


def _elements(
    blocks: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Values and the scales of their blocks, which broadcast, and magnitudes on the element's grid. fp32."""
    values, scale = blocks.to(torch.float32), block_scale[:, None, :, None]
    return values, scale, _magnitudes(values, encode[:, None, :, None], scale, noise, spec)


def _magnitudes(
    values: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> Tensor:
    """Magnitudes on the element's grid, fp32."""
    element = _element(spec)
    scaled = (values * encode).abs()
    if spec.rounding == "rne":
        rounded = round_nearest(scaled, element)
    else:
        assert noise is not None, "stochastic rounding is called with noise"
        round_up = round_stochastic if spec.rounding == "sr" else round_stochastic_32
        rounded = round_up(scaled, noise, element)
    return rounded if spec.te_compat else torch.where(block_scale == 0, 0.0, rounded)


def _poison(magnitude: Tensor, block_scale: Tensor, spec: OperandSpec) -> Tensor:
    """The largest magnitude in blocks whose scale is NaN."""
    return torch.where(block_scale != block_scale, _element(spec).max_value, magnitude)


def _number(values: Tensor) -> Tensor:
    """Values with zeros for NaN, whose sign differs between processors."""
    return torch.where(values != values, 0.0, values)


def _element(spec: OperandSpec) -> FloatFormat:
    element = spec.block_format.element
    assert element is not None
    return element
