"""Number formats as data.

An element format is a sign-magnitude grid: below 2**min_exponent it is uniform (the subnormals), above it
every binade holds 2**mantissa_bits values. A uniform integer grid is the case where everything is subnormal,
so one rounding rule (`rounding.py`) and one code rule (`codes.py`) apply to all. A block format defines which
elements share a scale.

To add a format, add an entry here, which the tests then cover, or register one from outside
(docs/extending.md). docs/nvfp4.md, section 3.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """A grid of representable magnitudes and its codes.

    The code of a magnitude is its index in the grid, so larger magnitudes have larger codes. The sign of a
    signed format is the bit above the magnitude bits.
    """

    name: str
    bits: int
    #: stored bits below the leading one
    mantissa_bits: int
    #: exponent of the smallest normal number; the subnormal step is 2**(min_exponent - mantissa_bits)
    min_exponent: int
    #: largest finite magnitude; rounding saturates here
    max_value: float
    signed: bool = True
    #: negative codes are the two's complement of the magnitude; there is no -0
    twos_complement: bool = False
    #: whether code 0 is zero; if not, it is half the smallest normal number (E8M0)
    has_zero: bool = True
    #: code written for NaN, or None if the format has none; codes above the largest value decode to NaN
    nan_code: int | None = None
    #: code that decodes to infinity; never written
    inf_code: int | None = None
    #: torch dtype with the same bit patterns, or None if torch has none
    dtype: torch.dtype | None = None

    @property
    def step_exponent(self) -> int:
        """Exponent of the smallest positive number."""
        return self.min_exponent - self.mantissa_bits

    @property
    def binades(self) -> int:
        """Number of different spacings of the grid: 1 for a uniform grid."""
        return math.frexp(self.max_value)[1] - self.min_exponent

    @property
    def max_code(self) -> int:
        """Magnitude code of the largest value."""
        above = max(self.binades - 1, 0)
        return int(self.max_value * 2.0 ** -(self.step_exponent + above)) + (above << self.mantissa_bits)

    @property
    def saturation_limit(self) -> float:
        """Half a step above the largest value: larger magnitudes saturate."""
        return self.max_value + 2.0 ** (self.step_exponent + max(self.binades - 1, 0) - 1)

    @property
    def sign_code(self) -> int:
        """The sign bit of a code; 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0


def _grid(name: str, bits: int, mantissa: int, lowest: int, largest: float, **kwargs: Any) -> FloatFormat:
    return FloatFormat(
        name=name, bits=bits, mantissa_bits=mantissa, min_exponent=lowest, max_value=largest, **kwargs
    )


E2M1 = _grid("e2m1", 4, 1, 0, 6.0)
E1M2 = _grid("e1m2", 4, 2, 0, 1.75)
INT4 = _grid("int4", 4, 3, 3, 7.0, twos_complement=True)
INT8 = _grid("int8", 8, 7, 7, 127.0, twos_complement=True)
E4M3 = _grid("e4m3", 8, 3, -6, 448.0, nan_code=0x7F, dtype=torch.float8_e4m3fn)
E5M2 = _grid("e5m2", 8, 2, -14, 57344.0, nan_code=0x7F, inf_code=0x7C, dtype=torch.float8_e5m2)
UE5M3 = _grid("ue5m3", 8, 3, -14, 61440.0, nan_code=0xFF, signed=False)
#: powers of two: a scale, not an element
E8M0 = _grid(
    "e8m0", 8, 0, -126, 2.0**127, nan_code=0xFF, signed=False, has_zero=False, dtype=torch.float8_e8m0fnu
)

ELEMENT_FORMATS = MappingProxyType({f.name: f for f in (E2M1, E1M2, INT4, INT8, E4M3, E5M2, UE5M3)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """An element format and the scales that its elements share.

    `scale` names the hierarchy of block scales (`quant.scale_hierarchy`): an element format, or `fp32`; None
    if elements have no scale. `block` is the default (other axis, contraction axis); None without blocks.
    `has_global_scale` adds an FP32 scale of the whole tensor (or of each 1 x outer_block).
    """

    name: str
    element: FloatFormat | None
    scale: str | None
    block: tuple[int, int] | None
    has_global_scale: bool = False
    #: block scale that the tensor's amax maps to (448 for NVFP4); the scale's own format may hold larger ones
    scale_max: float = 1.0
    #: elements along the contraction axis that share an FP32 scale; 0: the whole tensor
    outer_block: int = 0
    #: where block scales have several levels: blocks (other axis, contraction axis) under one number of each
    #: level but the finest
    scale_groups: tuple[tuple[int, int], ...] = ()
    #: block scales have too many bits for BF16 operands, and scale the GEMM's FP32 sums instead
    scale_in_epilogue: bool = False
    #: torch dtype of the values of a format without scales
    dtype: torch.dtype | None = None

    @property
    def quantized(self) -> bool:
        """Whether values are quantized, with scales (False for bf16 and fp32)."""
        return self.element is not None


def _two_level(
    name: str,
    element: FloatFormat,
    scale: FloatFormat,
    per_tensor: bool = True,
    outer: int = 0,
    scale_max: float = 0.0,
) -> BlockFormat:
    return BlockFormat(
        name=name,
        element=element,
        scale=scale.name,
        block=(1, 16),
        has_global_scale=per_tensor,
        scale_max=scale_max or scale.max_value,
        outer_block=outer,
    )


def _fp32_scaled(name: str, element: FloatFormat) -> BlockFormat:
    return BlockFormat(name=name, element=element, scale="fp32", block=(1, 128), scale_in_epilogue=True)


_SHIPPED = (
    _two_level("nvfp4", E2M1, E4M3),
    _two_level("nvfp4-double", E2M1, E4M3, outer=128),
    _two_level("nvfp4-ue5m3", E2M1, UE5M3, per_tensor=False),
    _two_level("nvfp4-ue5m3-global", E2M1, UE5M3, scale_max=448.0),
    _two_level("nve1m2", E1M2, E4M3),
    _two_level("nvint4", INT4, E4M3),
    BlockFormat(name="mxfp4", element=E2M1, scale="e8m0", block=(1, 32)),
    BlockFormat(name="mxfp8", element=E4M3, scale="e8m0", block=(1, 32)),
    BlockFormat(name="mxfp8-e5m2", element=E5M2, scale="e8m0", block=(1, 32)),
    _fp32_scaled("fp8", E4M3),
    _fp32_scaled("fp8-e5m2", E5M2),
    _fp32_scaled("int8", INT8),
    BlockFormat(name="bf16", element=None, scale=None, block=None, dtype=torch.bfloat16),
    BlockFormat(name="fp32", element=None, scale=None, block=None, dtype=torch.float32),
)

_formats = {f.name: f for f in _SHIPPED}
#: all formats by name: those of this file, and registered ones
BLOCK_FORMATS = MappingProxyType(_formats)


def add_block_format(block_format: BlockFormat) -> None:
    """Make a format known by its name. `quant.register.register_block_format` checks it first."""
    _formats[block_format.name] = block_format


def remove_block_format(name: str) -> None:
    """Remove a format that failed its trial."""
    del _formats[name]
