"""Element and scale grids (section 3.1) and their codecs (4 and 10): tables, bisection, exact fractions."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

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

    def place(self, p: int) -> tuple[int, Fraction]:
        """(lo, f): magnitude code of the largest magnitude <= min(|p|, largest), and the way to the next one.

        Magnitudes below the smallest one of a grid without zero (E8M0) have lo 0 and f 0.
        """
        if FP32.is_inf(p):
            return self.top, Fraction(0)
        a = abs(FP32.value(p))
        if a >= self.largest or a <= self.magnitudes[0]:
            return (self.top if a >= self.largest else 0), Fraction(0)
        lo = bisect_right(self.magnitudes, a) - 1
        return lo, (a - self.magnitudes[lo]) / (self.magnitudes[lo + 1] - self.magnitudes[lo])

    def nearest(self, p: int) -> int:
        """Section 4: nearest magnitude, ties to the even magnitude code, clamped, sign kept."""
        if FP32.is_nan(p):
            return self.top if self.nan is None else self.nan
        lo, f = self.place(p)
        up = f > Fraction(1, 2) or (f == Fraction(1, 2) and lo % 2 == 1)
        return self.join(bool(p & FP32.sign), lo + up)

    def stochastic(self, p: int, goes_up: Callable[[Fraction], bool]) -> int:
        """Section 10: lo or the next magnitude, as `goes_up(f)` says; p is not NaN."""
        lo, f = self.place(p)
        return self.join(bool(p & FP32.sign), lo + (f > 0 and goes_up(f)))

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
