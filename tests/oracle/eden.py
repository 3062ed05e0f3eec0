"""MS-EDEN (section 7.7): codes by RNE, then one correction per rotated group, rounded into its scales."""

from collections.abc import Callable
from fractions import Fraction

from oracle.floats import FP32, ONE, ZERO, halving_tree
from oracle.grids import E2M1, E4M3
from oracle.scales import Encode, block_scale, multiplier
from oracle.spec import Constants

GoesUp = list[Callable[[Fraction], bool]]  # for every block of the group, the decision of its random word


def correction(v: list[int], q: list[int]) -> int:
    """c = sum v*v / sum v*q; 1 if the divisor is 0 or c is not finite."""
    num = halving_tree([FP32.mul(a, a) for a in v])
    den = halving_tree([FP32.mul(a, b) for a, b in zip(v, q, strict=True)])
    if FP32.abs(den) == 0:
        return ONE
    c = FP32.div(num, den)
    return c if FP32.is_finite(c) else ONE


def group_codes(
    group: list[int], encode: Encode, c: Constants, goes_up: GoesUp
) -> tuple[list[int], list[int]]:
    """(element codes, block scales) of the n elements of one rotation, all finite."""
    v: list[int] = []
    s8: list[int] = []
    for start in range(0, len(group), 16):
        block = group[start : start + 16]
        ba = max(FP32.abs(y) for y in block)
        s = block_scale(FP32.mul(ba, encode.k), c, E4M3.nearest)
        e = multiplier(s, E4M3, encode.dec) if s else ZERO
        s8.append(s)
        v += [FP32.mul(y, e) for y in block]
    codes = [E2M1.nearest(value) for value in v]
    factor = correction(v, [E2M1.decode(code) for code in codes])
    scales = []
    for place, s in enumerate(s8):
        t = FP32.min(FP32.mul(E4M3.decode(s), factor), c.smax)
        scales.append(E4M3.stochastic(t, goes_up[place]) if s else 0)
    return codes, scales
