"""Elements: from a block's values and scales to magnitudes on the element grid, to codes or exact values.

docs/nvfp4.md, sections 4, 7.1 and 13.
"""

import torch
from torch import Tensor

from fourbits.formats.codes import grid_codes
from fourbits.formats.descriptors import FloatFormat
from fourbits.formats.rounding import round_nearest, round_stochastic, round_stochastic_32
from fourbits.quant.operand import OperandSpec


def rounded_magnitudes(
    values: Tensor, encode: Tensor, block_scale: Tensor, noise: Tensor | None, spec: OperandSpec
) -> Tensor:
    """Magnitudes of v = value * encode, rounded onto the element grid. fp32 [A, a, B, b].

    values: fp32 [A, a, B, b]; encode, block_scale: grids [A, B], see Scales; noise: random integers in the
    shape of values, for stochastic rounding.
    """
    scaled = (values * per_element(encode)).abs()
    if spec.rounding == "sr" or spec.rounding == "sr32":
        assert noise is not None, "stochastic rounding is called with noise"
        round_up = round_stochastic if spec.rounding == "sr" else round_stochastic_32
        rounded = round_up(scaled, noise, element_of(spec))
    else:  # ms-eden, too: its scales are the stochastic part
        rounded = round_nearest(scaled, element_of(spec))
    return rounded if spec.te_compat else torch.where(per_element(block_scale) == 0, 0.0, rounded)


def codes_of(magnitudes: Tensor, values: Tensor, block_scale: Tensor, spec: OperandSpec) -> Tensor:
    """Codes of magnitudes with the signs of values, uint8, one per element. [A, a, B, b]; block_scale [A, B].

    A poisoned block has the largest code.
    """
    return grid_codes(_poisoned(magnitudes, block_scale, spec), _without_nan(values), element_of(spec))


def exact_values_of(magnitudes: Tensor, values: Tensor, block_scale: Tensor, spec: OperandSpec) -> Tensor:
    """Values of an exact operand, bf16: element * block scale, or the element if scales come later.

    Arguments as for `codes_of`. A zero has the sign of the value.
    """
    if spec.block_format.scale_in_epilogue:
        magnitudes, values = _poisoned(magnitudes, block_scale, spec), _without_nan(values)
    else:
        magnitudes = magnitudes * per_element(block_scale)
    return torch.copysign(magnitudes, values).to(torch.bfloat16)


def per_element(grid: Tensor) -> Tensor:
    """A grid of blocks [A, B] that broadcasts over the elements [A, a, B, b]."""
    return grid[:, None, :, None]


def element_of(spec: OperandSpec) -> FloatFormat:
    """The grid of a quantized format's elements."""
    element = spec.block_format.element
    assert element is not None
    return element


def _poisoned(magnitudes: Tensor, block_scale: Tensor, spec: OperandSpec) -> Tensor:
    """The largest magnitude in blocks whose scale is NaN."""
    scale = per_element(block_scale)
    return torch.where(scale != scale, element_of(spec).max_value, magnitudes)


def _without_nan(values: Tensor) -> Tensor:
    """Values with zeros for NaN, whose sign differs between processors."""
    return torch.where(values != values, 0.0, values)
