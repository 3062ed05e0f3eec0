"""The grids of docs/nvfp4.md section 3.1 from its formula, in exact rational numbers."""

import bisect
from fractions import Fraction
from functools import cache

#: name: (bits, mantissa bits t, bias B, largest magnitude code, signed)
FLOATS = {
    "e2m1": (4, 1, 1, 7, True),
    "e1m2": (4, 2, 1, 7, True),
    "e4m3": (8, 3, 7, 126, True),
    "e5m2": (8, 2, 15, 123, True),
    "ue5m3": (8, 3, 15, 247, False),
}
INTEGERS = {"int4": 7, "int8": 127}


@cache
def magnitudes(name: str) -> list[Fraction]:
    """Every magnitude, in the order of its code."""
    if name in INTEGERS:
        return [Fraction(m) for m in range(INTEGERS[name] + 1)]
    _, t, bias, largest, _ = FLOATS[name]
    return [_magnitude(m, t, bias) for m in range(largest + 1)]


def _magnitude(m: int, t: int, bias: int) -> Fraction:
    e, f = m >> t, m & ((1 << t) - 1)
    if e == 0:
        return f * Fraction(2) ** (1 - bias - t)
    return (2**t + f) * Fraction(2) ** (e - bias - t)


def code(name: str, index: int, negative: bool) -> int:
    """The code of a magnitude with a sign."""
    bits = 8 if name == "int8" else 4 if name == "int4" else FLOATS[name][0]
    if name in INTEGERS:
        return -index % (1 << bits) if negative else index
    return index + (1 << (bits - 1)) * negative


def nearest(name: str, magnitude: Fraction) -> int:
    """Index of the nearest magnitude, ties to the even index, saturating."""
    grid = magnitudes(name)
    above = min(bisect.bisect_left(grid, magnitude), len(grid) - 1)
    below = max(above - 1, 0)
    to_below, to_above = magnitude - grid[below], grid[above] - magnitude
    if to_below == to_above:
        return below if below % 2 == 0 else above
    return below if to_below < to_above else above
