"""Number formats as data.

An element format is a sign-magnitude grid: below 2**min_exponent it is uniform (the subnormals), above it
every binade holds 2**mantissa_bits values. A uniform integer grid is the case where everything is subnormal,
so one rounding rule (`rounding.py`) and one code rule (`codes.py`) serve all of them. A block format says
which elements share which scale.

A new format is one entry here; the tests sweep the tables. docs/nvfp4.md, sections on formats and codecs.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """A grid of representable magnitudes and its codes.

    The code of a magnitude counts the grid from zero, so larger magnitudes have larger codes; the sign, where
    there is one, is the bit above the magnitude bits.
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
    #: code of NaN without its sign bit, or None where the format has none
    nan_code: int | None = None
    #: torch dtype with the same bit patterns, or None where torch has none
    dtype: torch.dtype | None = None

    @property
    def step_exponent(self) -> int:
        """Exponent of the smallest positive number."""
        return self.min_exponent - self.mantissa_bits

    @property
    def binades(self) -> int:
        """How many spacings the grid has: 1 for a uniform grid."""
        return math.frexp(self.max_value)[1] - self.min_exponent

    @property
    def sign_code(self) -> int:
        """The sign bit of a code; 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0


E2M1 = FloatFormat(name="e2m1", bits=4, mantissa_bits=1, min_exponent=0, max_value=6.0)
E1M2 = FloatFormat(name="e1m2", bits=4, mantissa_bits=2, min_exponent=0, max_value=1.75)
INT4 = FloatFormat(name="int4", bits=4, mantissa_bits=3, min_exponent=3, max_value=7.0)
INT8 = FloatFormat(name="int8", bits=8, mantissa_bits=7, min_exponent=7, max_value=127.0)
E4M3 = FloatFormat(
    name="e4m3",
    bits=8,
    mantissa_bits=3,
    min_exponent=-6,
    max_value=448.0,
    nan_code=0x7F,
    dtype=torch.float8_e4m3fn,
)
E5M2 = FloatFormat(
    name="e5m2",
    bits=8,
    mantissa_bits=2,
    min_exponent=-14,
    max_value=57344.0,
    nan_code=0x7F,
    dtype=torch.float8_e5m2,
)
UE5M3 = FloatFormat(
    name="ue5m3",
    bits=8,
    mantissa_bits=3,
    min_exponent=-14,
    max_value=61440.0,
    signed=False,
    nan_code=0xFF,
)

ELEMENT_FORMATS = MappingProxyType({f.name: f for f in (E2M1, E1M2, INT4, INT8, E4M3, E5M2, UE5M3)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Which elements share which scale.

    `scale` is the name of the stored block scale: an element format, `e8m0` (a power of two) or `fp32`; None
    where the elements are stored as they are. `block` is the default (other axis, contraction axis); None
    means one block for the whole tensor. `has_global_scale` adds the FP32 scale of the whole tensor (or of
    each 1 x outer_block).
    """

    name: str
    element: FloatFormat | None
    scale: str | None
    block: tuple[int, int] | None
    has_global_scale: bool = False
    #: largest block scale that the tensor's amax is mapped to (the 448 of NVFP4)
    scale_max: float = 1.0
    #: contraction-axis length over which the FP32 scale is shared, 0 for the whole tensor
    outer_block: int = 0
    #: torch dtype of the values where the format has no scale
    dtype: torch.dtype | None = None

    @property
    def quantized(self) -> bool:
        """Whether values are mapped to a grid with scales (False for bf16 and fp32)."""
        return self.element is not None


_FORMATS = (
    BlockFormat(
        name="nvfp4", element=E2M1, scale="e4m3", block=(1, 16), has_global_scale=True, scale_max=448.0
    ),
    BlockFormat(name="nvfp4-ue5m3", element=E2M1, scale="ue5m3", block=(1, 16), scale_max=61440.0),
    BlockFormat(
        name="nvfp4-double",
        element=E2M1,
        scale="e4m3",
        block=(1, 16),
        has_global_scale=True,
        scale_max=448.0,
        outer_block=128,
    ),
    BlockFormat(
        name="nve1m2", element=E1M2, scale="e4m3", block=(1, 16), has_global_scale=True, scale_max=448.0
    ),
    BlockFormat(
        name="nvint4", element=INT4, scale="e4m3", block=(1, 16), has_global_scale=True, scale_max=448.0
    ),
    BlockFormat(name="mxfp4", element=E2M1, scale="e8m0", block=(1, 32)),
    BlockFormat(name="mxfp8", element=E4M3, scale="e8m0", block=(1, 32)),
    BlockFormat(name="mxint8", element=INT8, scale="e8m0", block=(1, 32)),
    BlockFormat(name="fp8", element=E4M3, scale="fp32", block=None),
    BlockFormat(name="fp8-e5m2", element=E5M2, scale="fp32", block=None),
    BlockFormat(name="bf16", element=None, scale=None, block=None, dtype=torch.bfloat16),
    BlockFormat(name="fp32", element=None, scale=None, block=None, dtype=torch.float32),
)

BLOCK_FORMATS = MappingProxyType({f.name: f for f in _FORMATS})
