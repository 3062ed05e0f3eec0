"""Rounding a magnitude onto a format's grid, to nearest even or stochastically.

Every rule works on t = magnitude / step, where step is the grid's spacing at that magnitude: a power of two,
so both the division and the multiplication back are exact, and all rounding is a rounding of t to an integer.
docs/nvfp4.md, "Elements".
"""

import torch
from torch import Tensor

from fourbits.formats.descriptors import FloatFormat

_EXPONENT_MASK = 0x7F800000
#: formats with at most this many binades above the subnormals find the binade by comparing: cheaper than bit
#: casts
_FEW_BINADES = 4


def binade_index(magnitude: Tensor, fmt: FloatFormat) -> Tensor:
    """Which spacing of the grid holds: 0 up to 2**(min_exponent + 1), one more per binade above.

    magnitude: fp32 in [0, fmt.max_value] -> fp32 whole numbers of its shape.
    """
    if fmt.binades <= _FEW_BINADES:
        index = torch.zeros_like(magnitude)
        for above in range(1, fmt.binades):
            reached = magnitude >= 2.0 ** (fmt.min_exponent + above)
            index = torch.where(reached, torch.full_like(index, above), index)
        return index
    exponent = (magnitude.view(torch.int32) & _EXPONENT_MASK) >> 23
    return (exponent - (fmt.min_exponent + 127)).clamp_min(0).to(torch.float32)


def grid_step(magnitude: Tensor, fmt: FloatFormat) -> tuple[Tensor, Tensor]:
    """Spacing of the grid at each magnitude, and its reciprocal; both exact powers of two.

    magnitude: fp32 in [0, fmt.max_value] -> two fp32 tensors of its shape.
    """
    if fmt.binades <= _FEW_BINADES:
        step = torch.full_like(magnitude, 2.0**fmt.step_exponent)
        per_step = torch.full_like(magnitude, 2.0**-fmt.step_exponent)
        for above in range(1, fmt.binades):
            reached = magnitude >= 2.0 ** (fmt.min_exponent + above)
            step = torch.where(reached, torch.full_like(step, 2.0 ** (fmt.step_exponent + above)), step)
            per_step = torch.where(
                reached, torch.full_like(step, 2.0 ** -(fmt.step_exponent + above)), per_step
            )
        return step, per_step
    lowest = (fmt.min_exponent + 127) << 23
    binade = (magnitude.view(torch.int32) & _EXPONENT_MASK).clamp_min(lowest)
    step_bits = binade - (fmt.mantissa_bits << 23)
    return step_bits.view(torch.float32), ((254 << 23) - step_bits).view(torch.float32)


def round_nearest(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Nearest grid value, ties to the even code, saturating; the sign of zero is kept. values: fp32 -> fp32.

    Where torch has the format, its cast does the same once the values are clamped.
    """
    clipped = values.clamp(-fmt.max_value, fmt.max_value)
    if fmt.dtype is not None:
        return clipped.to(fmt.dtype).to(torch.float32)
    step, per_step = grid_step(clipped.abs(), fmt)
    return torch.round(clipped * per_step) * step


def round_stochastic(magnitude: Tensor, noise: Tensor, fmt: FloatFormat) -> Tensor:
    """Up with probability floor(256 f) / 256, where f is the distance to the lower neighbour in steps.

    magnitude: fp32 >= 0; noise: integers in [0, 255], one per element. What `cvt.rs` does with 8 bits per
    element.
    """
    clipped = magnitude.clamp_max(fmt.max_value)
    step, per_step = grid_step(clipped, fmt)
    lower_256ths = torch.floor(clipped * per_step * 256.0)
    return torch.floor((lower_256ths + noise.to(torch.float32)) * (1.0 / 256.0)) * step


def round_stochastic_32(magnitude: Tensor, noise: Tensor, fmt: FloatFormat) -> Tensor:
    """Up with probability f to 24 bits: the unbiased variant. noise: int64 words in [0, 2**32), one per
    element.
    """
    clipped = magnitude.clamp_max(fmt.max_value)
    step, per_step = grid_step(clipped, fmt)
    t = clipped * per_step
    lower = torch.floor(t)
    uniform = (noise >> 8).to(torch.float32) * 2.0**-24
    return (lower + (uniform < t - lower).to(torch.float32)) * step
