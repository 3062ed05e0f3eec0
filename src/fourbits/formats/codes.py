"""Encoding of values as codes, and decoding. docs/nvfp4.md, sections 3.1 and 4."""

import functools

import torch
from torch import Tensor

from fourbits.formats.descriptors import FloatFormat
from fourbits.formats.rounding import FEW_BINADES, grid_step, round_nearest


def encode(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes of the nearest grid values, saturating; NaN becomes the NaN code. values: fp32 -> uint8.

    In a format without a NaN code, NaN becomes the largest positive value.
    """
    codes = grid_codes(round_nearest(values.abs(), fmt), values, fmt)
    nan_code = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    return torch.where(torch.isnan(values), torch.full_like(codes, nan_code), codes)


def grid_codes(magnitude: Tensor, sign_of: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes of magnitudes on the grid with the signs of another tensor. Both fp32, not NaN -> uint8."""
    if fmt.dtype is not None:
        return torch.copysign(magnitude, sign_of).to(fmt.dtype).view(torch.uint8)
    code = _magnitude_code(magnitude, fmt)
    if fmt.twos_complement:
        signed = torch.copysign(code, sign_of)
        code = torch.where(signed < 0, signed + 2.0 * fmt.sign_code, signed)
    elif fmt.signed:
        half = torch.full_like(code, 0.5 * fmt.sign_code)
        code = code + (half - torch.copysign(half, sign_of))  # the sign bit, or zero
    return code.to(torch.uint8)


def decode(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Values of codes, exact. codes: uint8 -> fp32 of its shape."""
    values = _values(fmt) if torch.compiler.is_compiling() else _kept_values(fmt)  # it warns about caches
    return values.to(codes.device)[codes.long()]


def _magnitude_code(magnitude: Tensor, fmt: FloatFormat) -> Tensor:
    """The number of grid values below each magnitude, as fp32 whole numbers.

    The code increases by one per step, and the step doubles from one binade to the next.
    """
    if fmt.binades > FEW_BINADES:
        _, per_step = grid_step(magnitude, fmt)
        binade = _exponent(magnitude).clamp_min(fmt.min_exponent + 127) - (fmt.min_exponent + 127)
        return magnitude * per_step + (binade << fmt.mantissa_bits).to(torch.float32)
    code = magnitude * 2.0**-fmt.step_exponent
    for binade in range(1, fmt.binades):
        beyond = torch.relu(magnitude - 2.0 ** (fmt.min_exponent + binade))
        code = code - beyond * 2.0 ** -(fmt.step_exponent + binade)
    return code


def _exponent(magnitude: Tensor) -> Tensor:
    """The biased exponent field of fp32 numbers without sign, int32."""
    return magnitude.view(torch.int32) >> 23


def _values(fmt: FloatFormat) -> Tensor:
    """All 2**bits values of a format, fp32, in the order of their codes."""
    code = torch.arange(1 << fmt.bits, dtype=torch.int32, device="cpu")
    if fmt.twos_complement:
        return torch.where(code < fmt.sign_code, code, code - 2 * fmt.sign_code).to(torch.float32)
    magnitude = code & ~fmt.sign_code
    normal_bits = (magnitude << (23 - fmt.mantissa_bits)) + ((fmt.min_exponent + 126) << 23)
    subnormal = magnitude.to(torch.float32) * 2.0**fmt.step_exponent
    value = torch.where(magnitude >= 1 << fmt.mantissa_bits, normal_bits.view(torch.float32), subnormal)
    value = torch.where(magnitude > fmt.max_code, torch.full_like(value, torch.nan), value)
    if fmt.inf_code is not None:
        value = torch.where(magnitude == fmt.inf_code, torch.full_like(value, torch.inf), value)
    if not fmt.has_zero:
        value = torch.where(magnitude == 0, torch.full_like(value, 2.0 ** (fmt.min_exponent - 1)), value)
    return torch.where((code & fmt.sign_code) != 0, -value, value)


_kept_values = functools.cache(_values)
