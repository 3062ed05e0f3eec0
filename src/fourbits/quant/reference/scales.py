"""Scales: from block maxima to what is stored, and to the factors that elements are multiplied by.

A *decode* scale multiplies on the way back and is stored; an *encode* scale is used while quantizing only.
The order of operations is the specification: docs/nvfp4.md, section 7.
"""

import math
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


class Level(NamedTuple):
    """The FP32 scale above the block scales, and the amax it comes from. fp32 scalars, or grids."""

    amax: Tensor
    #: S_enc of the specification
    encode: Tensor
    #: S_dec, the stored global scale
    decode: Tensor


class Scales(NamedTuple):
    """The scales of a tensor's blocks. fp32; grids in the layout of the tensor, one number per block."""

    #: NaN where a block holds a non-finite value
    block_scale: Tensor
    #: scalar, 1 where the format has none; a grid of outer blocks for nvfp4-double
    global_scale: Tensor
    #: the elements are those of x * encode, rounded
    encode: Tensor
    #: the levels whose combination block_scale is, the finest first, where there are several
    levels: tuple[Tensor, ...] = ()


#: the levels of block scales, fp32 grids, the finest first; and the encode factors of all blocks
Derived = tuple[tuple[Tensor, ...], Tensor]


def block_maxima(blocks: Tensor) -> Tensor:
    """Largest magnitude of every block, NaN where the block has one. [A, a, B, b] -> fp32 [A, B]."""
    if not blocks.numel():
        return torch.zeros(blocks.shape[::2], dtype=torch.float32, device=blocks.device)
    return blocks.to(torch.float32).abs().amax(dim=(1, 3))


def tensor_amax(block_amax: Tensor, given: Tensor | None, spec: OperandSpec, axis: int) -> Tensor:
    """The maximum that the FP32 scale comes from: of the tensor, or of each outer block for nvfp4-double.

    given: fp32 scalar to use instead of the tensor's own. Zero where blocks have no scale above them.
    """
    outer = _outer_ratio(spec, axis)
    if outer is not None:
        return coarser_maxima(block_amax, outer)
    if not spec.tensor_scaled:
        return block_amax.new_zeros(())
    if given is not None:
        return given
    return block_amax.amax() if block_amax.numel() else block_amax.new_zeros(())


def level_of(amax: Tensor, spec: OperandSpec) -> Level:
    """The FP32 scale of a tensor (or of each outer block) with this amax; 1 where the format has none."""
    if spec.block_format.has_global_scale:
        encode = encode_scale_of(target_and_kappa(spec)[0], amax, spec)
    else:
        encode = torch.ones_like(amax)
    return Level(amax, encode, divide(1.0, encode))


def over_blocks(level: Level, block_amax: Tensor, spec: OperandSpec, axis: int) -> Level:
    """The level that applies to each block: scalars unchanged, outer grids spread over their blocks."""
    outer = _outer_ratio(spec, axis)
    if outer is None:
        return level
    return Level(*(finer(grid, outer, block_amax.shape) for grid in level))


def scale_of_maximum(block_amax: Tensor, level: Level, spec: OperandSpec) -> Tensor:
    """p: the block scale that maps a block's maximum to the largest element, before rounding."""
    _, kappa = target_and_kappa(spec)
    return block_amax * (level.encode * kappa)


def of_maximum(blocks: Tensor, block_amax: Tensor, level: Level, spec: OperandSpec, axis: int) -> Tensor:
    """The scale rules `max`, and `ceil`, which E8M0 scales round up."""
    return scale_of_maximum(block_amax, level, spec)


def small_float_scales(
    block_amax: Tensor, ideal: Tensor, level: Level, words: Tensor | None, spec: OperandSpec, axis: int
) -> Derived:
    """E4M3 or UE5M3 block scales, ideal ones rounded, and their encode factors."""
    block_scale = rounded_scales(ideal, words, spec)
    return (block_scale,), element_encode(block_scale, level)


def rounded_scales(ideal: Tensor, words: Tensor | None, spec: OperandSpec) -> Tensor:
    """Block scales on the grid of a small float. words: 32 random bits per block, for scale_rounding sr."""
    grid = SCALE_FORMATS[spec.block_format.scale or ""]
    if spec.scale_rounding == "sr":
        assert words is not None, "stochastic block scales are called with random bits"
        return round_stochastic_32(ideal.clamp_max(grid.max_value), words, grid)
    return round_nearest(ideal.clamp_max(grid.max_value), grid)


def element_encode(block_scale: Tensor, level: Level) -> Tensor:
    """e = min(1 / (s8 * S_dec), FLT_MAX): the factor on the elements under a block scale."""
    return divide(1.0, block_scale * level.decode).clamp_max(FLT_MAX)


def power_of_two_scales(
    block_amax: Tensor, ideal: Tensor, level: Level, words: Tensor | None, spec: OperandSpec, axis: int
) -> Derived:
    """E8M0 block scales and their encode factors: 2**(floor(log2 amax) - floor(log2 emax)).

    With `ceil` the least power of two under which amax does not exceed emax.
    """
    emax = _emax(spec)
    bits = block_amax.view(torch.int32)
    code = ((bits & _EXPONENT_BITS) >> 23) - (math.frexp(emax)[1] - 1)
    if spec.scale_rule == "ceil":
        largest_fraction = int((2 * math.frexp(emax)[0] - 1) * 2**23)
        code = code + ((bits & _FRACTION_BITS) > largest_fraction).to(torch.int32)
    code = code.clamp_min(0)
    return (_power_of_two(code - 127),), _power_of_two(127 - code)


def fp32_scales(
    block_amax: Tensor, ideal: Tensor, level: Level, words: Tensor | None, spec: OperandSpec, axis: int
) -> Derived:
    """FP32 block scales 1 / (emax / amax) (FP8, INT8) and their encode factors.

    A block of the whole tensor uses the tensor's amax, which may be a given one.
    """
    amax = level.amax.reshape(1, 1) if spec.block_size is None else block_amax
    encode = encode_scale_of(_emax(spec), amax, spec)
    return (divide(1.0, encode),), encode


def poisoned(block_scale: Tensor, block_amax: Tensor, level: Level) -> Tensor:
    """NaN as the scale of blocks that hold a NaN or Inf, and of all blocks under a non-finite amax."""
    healthy = torch.isfinite(block_amax) & torch.isfinite(level.amax)
    return torch.where(healthy, block_scale, torch.nan)


def target_and_kappa(spec: OperandSpec) -> tuple[float, float]:
    """T, which the tensor's amax is mapped to, and kappa, from a block's maximum to its scale; both fp32."""
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
    """Blocks per outer block in the layout of the tensor; None without outer blocks."""
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
    return torch.tensor(quotient, dtype=torch.float32, device="cpu").item()
