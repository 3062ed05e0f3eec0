"""fp32 scales, block scales and multipliers (sections 7.1 to 7.3)."""

from collections.abc import Callable
from dataclasses import dataclass

from oracle.floats import FMAX, FP32, ONE, ZERO, exponent_field, fraction_field, power_of_two
from oracle.grids import E2M1, E4M3, E5M2, Grid
from oracle.spec import Constants, Spec

RoundScale = Callable[[int], int]  # an fp32 value, at most smax, to a scale code


@dataclass(frozen=True)
class Encode:
    """S_enc, S_dec and k of a tensor or an outer block, and the amax they come from."""

    enc: int
    dec: int
    k: int
    amax: int


def encode_scale(numerator: int, amax: int, pow2: bool) -> int:
    """S_enc = min(numerator / amax, FMAX), 1 if amax is 0; pow2 clears the mantissa."""
    s = ONE if amax == 0 else FP32.min(FP32.div(numerator, amax), FMAX)
    return s & ~0x7FFFFF if pow2 else s


def encode_of(amax: int, c: Constants, spec: Spec) -> Encode:
    """Per tensor or outer block, for a finite amax; a format without an fp32 scale has S_enc 1."""
    enc = encode_scale(c.T, amax, spec.fp32_scale == "pow2") if spec.kind.fp32 else ONE
    return Encode(enc, FP32.div(ONE, enc), FP32.mul(enc, c.kappa), amax)


def multiplier(s8: int, grid: Grid, dec: int) -> int:
    """e = min(1 / (fp32(s8) * S_dec), FMAX)."""
    return FP32.min(FP32.div(ONE, FP32.mul(grid.decode(s8), dec)), FMAX)


def block_scale(p: int, c: Constants, round_scale: RoundScale) -> int:
    """s8 of p: min(p, smax), rounded."""
    return round_scale(FP32.min(p, c.smax))


def is_saturated(p: int, grid: Grid) -> bool:
    """Whether the scale would have rounded above smax: p > 464, or > 63488 for UE5M3."""
    return FP32.less(FP32.of(464 if grid is E4M3 else 63488), p)


E8M0_RULES: dict[Grid, tuple[int, int]] = {E2M1: (2, 0x400000), E4M3: (8, 0x600000), E5M2: (15, 0x600000)}


def e8m0_scale(ba: int, element: Grid, rule: str) -> int:
    """b of section 7.2."""
    u, g = E8M0_RULES[element]
    rounds_up = rule == "ceil" and fraction_field(ba) > g
    return max(exponent_field(ba) - u + rounds_up, 0)


def e8m0_multiplier(b: int) -> int:
    return power_of_two(127 - b)


def fp32_scale(ba: int, element: Grid, pow2: bool) -> tuple[int, int]:
    """(S_enc, scale) of section 7.3."""
    enc = encode_scale(FP32.of(element.largest), ba, pow2)
    return enc, FP32.div(ONE, enc)


def largest_magnitude(patterns: list[int]) -> int:
    """Maximum of abs bits as integers; 0 for none."""
    return max((FP32.abs(p) for p in patterns), default=ZERO)
