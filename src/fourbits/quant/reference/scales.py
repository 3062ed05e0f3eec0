"""Scales: from block maxima to what is stored, and to what the elements are multiplied by.

One function per kind of block scale. Each turns block maxima into decode scales (they multiply on the way
back) and encode multipliers. The order of operations is the specification: docs/nvfp4.md, section 7.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.formats.rounding import round_nearest, round_stochastic_32
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference.blocks import coarser_maxima, finer, in_layout
from fourbits.quant.scale_codes import SCALE_FORMATS

FLT_MAX = torch.finfo(torch.float32).max
_EXPONENT_BITS = 0x7F800000
_FRACTION_BITS = 0x007FFFFF
#: largest block scale and share of the largest element that MS-EDEN maps maxima to (arXiv:2601.22813)
_EDEN_BOUND, _EDEN_SHARE = Fraction("255.99"), Fraction("0.988125")
_HEADROOM = Fraction(17, 16)


class Scales(NamedTuple):
    """What a tensor's blocks are scaled by. fp32; grids in the layout of the tensor, one number per block."""

    #: NaN where a block holds a non-finite value
    block_scale: Tensor
    #: scalar, 1 where the format has none; a grid of outer blocks for nvfp4-double
    global_scale: Tensor
    #: x * encode is what the elements round
    encode: Tensor


class Level(NamedTuple):
    """The FP32 scale above the block scales: scalars, or grids of one number per block. fp32."""

    amax: Tensor
    encode: Tensor
    decode: Tensor


def level_of(block_amax: Tensor, amax: Tensor | None, spec: OperandSpec, axis: int) -> tuple[Level, Tensor]:
    """The FP32 scale that holds for each block, and as it is stored: scalar, or outer grid for nvfp4-double.

    block_amax: fp32 grid in layout; amax: to use instead of the tensor's own.
    """
    ratio = _outer_ratio(spec, axis)
    if ratio is not None:
        amax = coarser_maxima(block_amax, ratio)
    elif not spec.tensor_scaled:
        amax = block_amax.new_zeros(())
    elif amax is None:
        amax = block_amax.amax() if block_amax.numel() else block_amax.new_zeros(())
    if spec.block_format.has_global_scale:
        encode = encode_scale_of(target_and_kappa(spec)[0], amax, spec)
    else:
        encode = torch.ones_like(amax)
    level = Level(amax, encode, divide(1.0, encode))
    if ratio is None:
        return level, level.decode
    return Level(*(finer(grid, ratio, block_amax.shape) for grid in level)), level.decode


def two_level_scales(wanted: Tensor, level: Level, spec: OperandSpec, words: Tensor | None) -> Scales:
    """Small-float block scales under an FP32 scale (NVFP4), rounded from what a scale rule wants.

    wanted: fp32 grid; words: random 32-bit integers, one per block, for stochastic rounding.
    """
    fmt = spec.block_format
    grid = SCALE_FORMATS[fmt.scale or ""]
    if spec.scale_rounding == "sr":
        assert words is not None, "stochastic block scales are called with random bits"
        block_scale = round_stochastic_32(wanted.clamp_max(fmt.scale_max), words, grid)
    else:
        block_scale = round_nearest(wanted.clamp_max(fmt.scale_max), grid)
    return Scales(block_scale, level.decode, element_encode(block_scale, level))


def element_encode(block_scale: Tensor, level: Level) -> Tensor:
    """min(1 / (s8 * S_dec), FLT_MAX): what elements are multiplied by under a block scale."""
    return divide(1.0, block_scale * level.decode).clamp_max(FLT_MAX)


def max_target(block_amax: Tensor, level: Level, spec: OperandSpec) -> Tensor:
    """The block scale that maps a block's maximum to the largest element, before rounding."""
    _, kappa = target_and_kappa(spec)
    return block_amax * (level.encode * kappa)


def power_of_two_scales(block_amax: Tensor, level: Level, spec: OperandSpec) -> Scales:
    """E8M0 block scales, 2**(floor(log2 amax) - floor(log2 emax)); with `ceil` the least that covers amax."""
    emax = _emax(spec)
    bits = block_amax.view(torch.int32)
    code = ((bits & _EXPONENT_BITS) >> 23) - (math.frexp(emax)[1] - 1)
    if spec.scale_rule == "ceil":
        largest_fraction = int((2 * math.frexp(emax)[0] - 1) * 2**23)
        code = code + ((bits & _FRACTION_BITS) > largest_fraction).to(torch.int32)
    code = code.clamp_min(0)
    return Scales(_power_of_two(code - 127), level.decode, _power_of_two(127 - code))


def fp32_scales(block_amax: Tensor, level: Level, spec: OperandSpec) -> Scales:
    """FP32 block scales 1 / (emax / amax) (FP8, INT8); a block of the whole tensor takes the amax in use."""
    amax = level.amax.reshape(1, 1) if spec.block_size is None else block_amax
    encode = encode_scale_of(_emax(spec), amax, spec)
    return Scales(divide(1.0, encode), level.decode, encode)


#: scales that need the block maxima only, by what is stored
SIMPLE_SCALES: dict[str, Callable[[Tensor, Level, OperandSpec], Scales]] = {
    "e8m0": power_of_two_scales,
    "fp32": fp32_scales,
}


def poisoned(scales: Scales, block_amax: Tensor, level: Level) -> Scales:
    """NaN scales for blocks that hold a NaN or Inf, and for all under an amax that is not finite."""
    healthy = torch.isfinite(block_amax) & torch.isfinite(level.amax)
    return scales._replace(block_scale=torch.where(healthy, scales.block_scale, torch.nan))


def target_and_kappa(spec: OperandSpec) -> tuple[float, float]:
    """What the tensor's amax is mapped to, and the factor from a block's maximum to its scale; both fp32."""
    emax = Fraction(_emax(spec))
    if spec.rounding == "ms-eden":
        return _fp32(_EDEN_BOUND * emax / _EDEN_SHARE), _fp32(_EDEN_SHARE / emax)
    share = _HEADROOM if spec.sr_headroom else Fraction(1)
    return _fp32(Fraction(spec.bound) * emax / share), _fp32(share / emax)


def encode_scale_of(target: float, amax: Tensor, spec: OperandSpec) -> Tensor:
    """min(target / amax, FLT_MAX), 1 where amax is 0 or not finite. amax: fp32 -> fp32 of its shape."""
    scale = divide(target, amax).clamp_max(FLT_MAX)
    if spec.fp32_scale == "pow2":
        scale = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax != 0), scale, 1.0)


def divide(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """The correctly rounded quotient; with a Python number it would become a product with a reciprocal."""
    if not isinstance(numerator, Tensor):
        assert isinstance(denominator, Tensor)
        numerator = torch.full_like(denominator, numerator)
    if not isinstance(denominator, Tensor):
        denominator = torch.full_like(numerator, denominator)
    return torch.div(numerator, denominator)


def _outer_ratio(spec: OperandSpec, axis: int) -> tuple[int, int] | None:
    """Blocks per outer block in the layout of the tensor."""
    if spec.outer_size is None or spec.block_size is None:
        return None
    (rows, cols), (outer_rows, outer_cols) = spec.block_size, spec.outer_size
    return in_layout((outer_rows // rows, outer_cols // cols), axis)


def _emax(spec: OperandSpec) -> float:
    assert spec.block_format.element is not None
    return spec.block_format.element.max_value


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent for int32 exponents in [-127, 127], fp32; 2**-127 is subnormal."""
    normal = ((exponent + 127) << 23).view(torch.float32)
    return torch.where(exponent == -127, torch.full_like(normal, 2.0**-127), normal)


def _fp32(value: Fraction) -> float:
    quotient = value.numerator / value.denominator  # float(value), which torch 2.11 does not compile
    return torch.tensor(quotient, dtype=torch.float32).item()
