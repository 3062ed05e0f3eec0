"""Rounding to a format's grid, to nearest even or stochastically. docs/nvfp4.md, sections 4 and 10.

Every rule works in steps, the spacing of the grid at a magnitude. A step is a power of two, so dividing by it
and multiplying back are exact, and rounding is to a whole number of steps.
"""

import torch
from torch import Tensor

from fourbits.formats.descriptors import FloatFormat

_EXPONENT_MASK = 0x7F800000
#: grids with at most this many spacings look up the step by comparisons, which are cheaper than bit casts
FEW_BINADES = 4


def grid_step(magnitude: Tensor, fmt: FloatFormat) -> tuple[Tensor, Tensor]:
    """Spacing of the grid at each magnitude, and its reciprocal; both exact powers of two.

    magnitude: fp32 in [0, fmt.max_value] -> two fp32 tensors of its shape.
    """
    if fmt.binades <= FEW_BINADES:
        return _by_binade(magnitude, fmt, 1), _by_binade(magnitude, fmt, -1)
    lowest = (fmt.min_exponent + 127) << 23
    binade = (magnitude.view(torch.int32) & _EXPONENT_MASK).clamp_min(lowest)
    step_bits = binade - (fmt.mantissa_bits << 23)
    return step_bits.view(torch.float32), ((254 << 23) - step_bits).view(torch.float32)


def round_nearest(magnitude: Tensor, fmt: FloatFormat) -> Tensor:
    """Nearest grid value, ties to the even code, saturating. magnitude: fp32 >= 0 -> fp32 of its shape.

    fp32 has 24 significant bits. Subtracting a magnitude from a number 2**(23 - t) times as large rounds it
    to a multiple of 2**-t of its own binade, to nearest even: the grid for t mantissa bits. Where the grid is
    uniform, the large number is constant, that of the first binade.
    """
    clipped = magnitude.clamp_max(fmt.max_value)
    if not fmt.has_zero:  # powers of two only; the shift would overflow fp32
        return clipped.to(fmt.dtype).to(torch.float32)
    shift = 2.0 ** (23 - fmt.mantissa_bits)
    least = 2.0**fmt.min_exponent * (shift + 2.0)
    large = torch.relu(clipped * shift - least) + least  # their maximum, exact
    return large - (large - clipped)


def round_stochastic(magnitude: Tensor, noise: Tensor, fmt: FloatFormat) -> Tensor:
    """Up with probability floor(256 f) / 256, where f is the distance to the lower neighbour in steps.

    magnitude: fp32 >= 0; noise: integers in [0, 255], one per element. The rule of `cvt.rs` with 8 bits
    per element.
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


def _by_binade(magnitude: Tensor, fmt: FloatFormat, sign: int) -> Tensor:
    """step**sign at each magnitude, for grids of few binades."""
    result = torch.full_like(magnitude, 2.0 ** (sign * fmt.step_exponent))
    for above in range(1, fmt.binades):
        reached = magnitude >= 2.0 ** (fmt.min_exponent + above)
        result = torch.where(reached, 2.0 ** (sign * (fmt.step_exponent + above)), result)
    return result
