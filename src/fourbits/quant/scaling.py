"""Scales: from block maxima to what is stored, and to what the elements are multiplied by.

One rule per kind of block scale. Each takes block maxima and the tensor's amax and returns decode scales
(they multiply on the way back) and the encode multiplier. The order of operations is the specification:
docs/nvfp4.md, section 7.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fourbits.formats.descriptors import BlockFormat
from fourbits.formats.rounding import round_nearest
from fourbits.quant.tensor import SCALE_FORMATS

FLT_MAX = torch.finfo(torch.float32).max


class Scales(NamedTuple):
    """What one tensor's blocks are scaled by. All fp32; block tensors have block_amax's shape."""

    block_scale: Tensor
    #: scalar; 1 where the format has none
    global_scale: Tensor
    #: x * encode is what the elements round
    encode: Tensor


def divide(numerator: float, denominator: Tensor) -> Tensor:
    """Correctly rounded numerator / denominator; a Python number over a tensor would become a reciprocal and
    a product.
    """
    return torch.div(torch.full_like(denominator, numerator), denominator)


def encode_scale_of(target: float, amax: Tensor) -> Tensor:
    """min(target / amax, FLT_MAX), 1 where amax is 0 or not finite. amax: fp32 -> fp32 of its shape."""
    usable = torch.isfinite(amax) & (amax != 0)
    return torch.where(usable, divide(target, amax).clamp_max(FLT_MAX), 1.0)


def two_level_scales(block_amax: Tensor, amax: Tensor, block_format: BlockFormat) -> Scales:
    """Small-float block scales under an FP32 global scale (NVFP4). block_amax: fp32; amax: fp32 broadcastable
    to it.
    """
    assert block_format.element is not None
    assert block_format.scale is not None
    if block_format.has_global_scale:
        s_enc = encode_scale_of(block_format.scale_max * block_format.element.max_value, amax)
    else:
        s_enc = torch.ones_like(amax)
    global_scale = divide(1.0, s_enc)
    kappa = torch.full_like(s_enc, 1.0 / block_format.element.max_value)
    target = (block_amax * (s_enc * kappa)).clamp_max(block_format.scale_max)
    block_scale = round_nearest(target, SCALE_FORMATS[block_format.scale])
    encode = divide(1.0, block_scale * global_scale).clamp_max(FLT_MAX)
    return _poison(Scales(block_scale, global_scale, encode), block_amax, amax)


def power_of_two_scales(block_amax: Tensor, amax: Tensor, block_format: BlockFormat) -> Scales:
    """E8M0 block scales: 2**(floor(log2 block_amax) - element's largest exponent), saturating (MXFP4,
    MXFP8).
    """
    assert block_format.element is not None
    element_exponent = torch.frexp(torch.tensor(block_format.element.max_value)).exponent.item() - 1
    exponent = (block_amax.view(torch.int32) >> 23) - (127 + int(element_exponent))
    exponent = exponent.clamp(-127, 127)
    block_scale = _power_of_two(exponent)
    scales = Scales(block_scale, torch.ones_like(amax), _power_of_two(-exponent))
    return _poison(scales, block_amax, amax)


def fp32_scales(block_amax: Tensor, amax: Tensor, block_format: BlockFormat) -> Scales:
    """FP32 block scales 1 / (element_max / block_amax) (FP8 per tensor and in 128-blocks)."""
    assert block_format.element is not None
    encode = encode_scale_of(block_format.element.max_value, block_amax)
    return _poison(Scales(divide(1.0, encode), torch.ones_like(amax), encode), block_amax, amax)


SCALE_RULES = {
    "e4m3": two_level_scales,
    "ue5m3": two_level_scales,
    "e8m0": power_of_two_scales,
    "fp32": fp32_scales,
}


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent for int32 exponents in [-127, 127], fp32; 2**-127 is subnormal."""
    normal = ((exponent + 127) << 23).view(torch.float32)
    return torch.where(exponent == -127, torch.full_like(normal, 2.0**-127), normal)


def _poison(scales: Scales, block_amax: Tensor, amax: Tensor) -> Scales:
    """NaN scales for blocks that hold a NaN or Inf, and for every block where the tensor's amax is not
    finite.
    """
    healthy = torch.isfinite(block_amax) & torch.isfinite(amax)
    return scales._replace(block_scale=torch.where(healthy, scales.block_scale, torch.nan))
