"""Grid values to codes and back: exact, no rounding. docs/nvfp4.md, "Codecs"."""

import functools

import torch
from torch import Tensor

from fourbits.formats.descriptors import FloatFormat
from fourbits.formats.rounding import binade_index, grid_step


def encode(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes of values that lie on the grid. values: fp32 -> uint8 of its shape; NaN gets the NaN code.

    A magnitude's code counts the grid up to it: its multiple of the local step, plus one half-full binade for
    each spacing below.
    """
    if fmt.dtype is not None:
        return values.to(fmt.dtype).view(torch.uint8)
    magnitude = values.abs()
    _, per_step = grid_step(magnitude, fmt)
    code = magnitude * per_step + binade_index(magnitude, fmt) * float(1 << fmt.mantissa_bits)
    if fmt.nan_code is not None:
        code = torch.where(torch.isnan(values), torch.full_like(code, fmt.nan_code), code)
    if fmt.signed:
        negative = torch.copysign(torch.ones_like(values), values) < 0
        code = torch.where(negative, code + float(fmt.sign_code), code)
    return code.to(torch.uint8)


def decode(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Values of codes. codes: uint8 -> fp32 of its shape."""
    return _values(fmt).to(codes.device)[codes.long()]


@functools.cache
def _values(fmt: FloatFormat) -> Tensor:
    """All 2**bits values of a format, fp32, in the order of their codes."""
    code = torch.arange(1 << fmt.bits, dtype=torch.int32)
    magnitude = code & ~fmt.sign_code
    normal_bits = (magnitude << (23 - fmt.mantissa_bits)) + ((fmt.min_exponent + 126) << 23)
    subnormal = magnitude.to(torch.float32) * 2.0**fmt.step_exponent
    value = torch.where(magnitude >= 1 << fmt.mantissa_bits, normal_bits.view(torch.float32), subnormal)
    if fmt.nan_code is not None:
        value = torch.where(magnitude == fmt.nan_code, torch.full_like(value, torch.nan), value)
    return torch.where((code & fmt.sign_code) != 0, -value, value)
