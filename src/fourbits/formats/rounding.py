"""Rounding onto a format's grid, to nearest even or stochastically. docs/nvfp4.md, sections 4 and 10.

Every rule works in steps, the grid's spacing at a magnitude: a power of two, so dividing by it and
multiplying back are exact, and all rounding is a rounding to a whole number of steps.
"""

import torch
from torch import Tensor

from fourbits.formats.descriptors import FloatFormat

_EXPONENT_MASK = 0x7F800000
#: grids with at most this many spacings find the one that holds by comparing: cheaper than bit casts
FEW_BINADES = 4
#: added to a number below 2**22, it leaves whole numbers only, the nearest, ties to even
_WHOLE = 1.5 * 2.0**23


def grid_step(magnitude: Tensor, fmt: FloatFormat) -> tuple[Tensor, Tensor]:
    """Spacing of the grid at each magnitude, and its reciprocal; both exact powers of two.

    magnitude: fp32 in [0, fmt.max_value] -> two fp32 tensors of its shape.
    """
    if fmt.binades <= FEW_BINADES:
        return _by_binade(magnitude, fmt, 1.0), _by_binade(magnitude, fmt, 1.0, reciprocal=True)
    lowest = (fmt.min_exponent + 127) << 23
    binade = (magnitude.view(torch.int32) & _EXPONENT_MASK).clamp_min(lowest)
    step_bits = binade - (fmt.mantissa_bits << 23)
    return step_bits.view(torch.float32), ((254 << 23) - step_bits).view(torch.float32)


def round_nearest(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Nearest grid value, ties to the even code, saturating. values: fp32, not NaN -> fp32 of its shape.

    The sign of what rounds to zero is not kept.
    """
    clipped = values.clamp(-fmt.max_value, fmt.max_value)
    if fmt.dtype is not None:
        return clipped.to(fmt.dtype).to(torch.float32)
    if fmt.binades <= FEW_BINADES:
        whole_steps = _by_binade(clipped.abs(), fmt, _WHOLE)
        return (clipped + whole_steps) - whole_steps
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
    """Up with probability f, rounded up to 24 bits. noise: 32-bit words as integers, one per element."""
    clipped = magnitude.clamp_max(fmt.max_value)
    step, per_step = grid_step(clipped, fmt)
    steps = clipped * per_step
    lower = torch.floor(steps)
    uniform = ((noise >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    return (lower + (uniform < steps - lower).to(torch.float32)) * step


def _by_binade(magnitude: Tensor, fmt: FloatFormat, factor: float, reciprocal: bool = False) -> Tensor:
    """factor * step (or factor / step) at each magnitude, for a grid of few binades."""
    sign = -1 if reciprocal else 1
    result = torch.full_like(magnitude, factor * 2.0 ** (sign * fmt.step_exponent))
    for above in range(1, fmt.binades):
        reached = magnitude >= 2.0 ** (fmt.min_exponent + above)
        value = torch.full_like(magnitude, factor * 2.0 ** (sign * (fmt.step_exponent + above)))
        result = torch.where(reached, value, result)
    return result
