"""Element and scale grids (section 3.1) and their codecs (4 and 10): tables, bisection, exact fractions."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property

from oracle.floats import FP32, NAN, ZERO


def float_grid(mantissa_bits: int, bias: int, count: int) -> tuple[Fraction, ...]:
    """Magnitudes of codes 0 .. count-1 of a float grid."""
    t, magnitudes = mantissa_bits, []
    for m in range(count):
        e, f = m >> t, m & ((1 << t) - 1)
        top, exponent = (f, 1 - bias - t) if e == 0 else ((1 << t) + f, e - bias - t)
        magnitudes.append(top * Fraction(2) ** exponent)
    return tuple(magnitudes)


@dataclass(frozen=True, eq=False)
class Grid:
    """Magnitudes in increasing order and how a sign joins them.

    layout: "sign" (sign bit above the magnitude), "twos" (two's complement) or "unsigned".
    specials: codes beyond the magnitudes, with the fp32 pattern each decodes to.
    """

    name: str
    bits: int
    layout: str
    magnitudes: tuple[Fraction, ...]
    nan: int | None = None
    specials: dict[int, int] = field(default_factory=dict)

    @property
    def largest(self) -> Fraction:
        return self.magnitudes[-1]

    @property
    def top(self) -> int:
        """The magnitude code of the largest magnitude."""
        return len(self.magnitudes) - 1

    def join(self, negative: bool, m: int) -> int:
        """The code of a magnitude code with a sign."""
        if not negative or self.layout == "unsigned":
            return m
        if self.layout == "twos":
            return (-m) % (1 << self.bits)
        return (1 << (self.bits - 1)) + m

    def part(self, code: int) -> tuple[bool, int]:
        """(negative, magnitude code) of a code that is not special."""
        half = 1 << (self.bits - 1)
        if self.layout == "unsigned" or code < half:
            return False, code
        return True, (1 << self.bits) - code if self.layout == "twos" else code - half

    @cache  # noqa: B019 (there are eight grids)
    def decode(self, code: int) -> int:
        """The fp32 pattern of a code; exact."""
        if code in self.specials:
            return self.specials[code]
        negative, m = self.part(code)
        magnitude = FP32.of(self.magnitudes[m])
        return FP32.neg(magnitude) if negative else magnitude

    def exact(self, code: int) -> Fraction:
        """The exact value of a code that is not special."""
        return FP32.value(self.decode(code))

    @cached_property
    def unit(self) -> int:
        """Exponent of a power of two of which all magnitudes are multiples."""
        return min(m.numerator.bit_length() - m.denominator.bit_length() for m in self.magnitudes if m)

    @cached_property
    def multiples(self) -> list[int]:
        """The magnitudes in that unit."""
        return [int(m / Fraction(2) ** self.unit) for m in self.magnitudes]

    def place(self, p: int) -> tuple[int, int, int]:
        """(lo, rest, step): magnitude code of the largest magnitude <= |p|, and f = rest / step.

        Below the smallest magnitude of a grid without zero (E8M0), lo and f are 0.
        """
        if FP32.is_inf(p):
            return self.top, 0, 1
        m, e = FP32.split(p)
        finer = max(self.unit - e, 0)
        a = m << max(e - self.unit, 0)  # |p| in units of 2^-finer of the grid's
        lo = bisect_right(self.multiples, a >> finer) - 1
        if lo < 0 or lo == self.top:
            return max(lo, 0), 0, 1
        step = self.multiples[lo + 1] - self.multiples[lo]
        return lo, a - (self.multiples[lo] << finer), step << finer

    def nearest(self, p: int) -> int:
        """Section 4: nearest magnitude, ties to the even magnitude code, clamped, sign kept."""
        if FP32.is_nan(p):
            return self.top if self.nan is None else self.nan
        lo, rest, step = self.place(p)
        up = 2 * rest > step or (2 * rest == step and lo % 2 == 1)
        return self.join(bool(p & FP32.sign), lo + up)

    def stochastic(self, p: int, goes_up: Callable[[Fraction], bool]) -> int:
        """Section 10: lo or the next magnitude, as `goes_up(f)` says; p is not NaN."""
        lo, rest, step = self.place(p)
        return self.join(bool(p & FP32.sign), lo + (rest > 0 and goes_up(Fraction(rest, step))))

    def saturated(self, p: int) -> int:
        """The largest magnitude with the sign of p, sign 0 where p is NaN (section 13)."""
        return self.join(bool(p & FP32.sign) and not FP32.is_nan(p), self.top)

    def signed_zero(self, p: int) -> int:
        return self.join(bool(p & FP32.sign), 0)


E2M1 = Grid("E2M1", 4, "sign", float_grid(1, 1, 8))
E1M2 = Grid("E1M2", 4, "sign", float_grid(2, 1, 8))
INT4 = Grid("INT4", 4, "twos", tuple(Fraction(m) for m in range(8)), specials={8: FP32.of(-8)})
INT8 = Grid("INT8", 8, "twos", tuple(Fraction(m) for m in range(128)), specials={128: FP32.of(-128)})
E4M3 = Grid("E4M3", 8, "sign", float_grid(3, 7, 127), 0x7F, {0x7F: NAN, 0xFF: NAN})
E5M2 = Grid(
    "E5M2",
    8,
    "sign",
    float_grid(2, 15, 124),
    0x7F,
    {0x7C: FP32.inf, 0xFC: FP32.neg(FP32.inf)} | dict.fromkeys([0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], NAN),
)
UE5M3 = Grid("UE5M3", 8, "unsigned", float_grid(3, 15, 248), 0xFF, dict.fromkeys(range(0xF8, 0x100), NAN))
E8M0 = Grid("E8M0", 8, "unsigned", tuple(Fraction(2) ** (b - 127) for b in range(255)), 0xFF, {0xFF: NAN})

GRIDS = {grid.name: grid for grid in (E2M1, E1M2, INT4, INT8, E4M3, E5M2, UE5M3, E8M0)}


def up_by_byte(byte: int) -> Callable[[Fraction], bool]:
    """`sr`: up if and only if byte + floor(256 f) >= 256."""
    return lambda f: byte + (256 * f.numerator) // f.denominator >= 256


def up_by_word(word: int) -> Callable[[Fraction], bool]:
    """`sr32`: up if and only if (r >> 8) * 2^-24 < f."""
    return lambda f: Fraction(word >> 8, 1 << 24) < f


assert all(grid.decode(0) == ZERO for grid in GRIDS.values() if grid.name != "E8M0")
