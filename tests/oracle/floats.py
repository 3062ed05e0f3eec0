"""Binary floating point on integers (section 1): a number is its bit pattern, every operation rounds once."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property


@dataclass(frozen=True)
class Binary:
    """An IEEE binary format. All methods take and return bit patterns unless they say otherwise."""

    exponent_bits: int
    fraction_bits: int

    @cached_property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.fraction_bits)

    @cached_property
    def inf(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @cached_property
    def nan(self) -> int:
        return self.inf | 1 << (self.fraction_bits - 1)

    @cached_property
    def largest(self) -> int:
        return self.inf - 1

    @cached_property
    def one(self) -> int:
        return ((1 << (self.exponent_bits - 1)) - 1) << self.fraction_bits

    @cached_property
    def lowest_exponent(self) -> int:
        """Exponent of the unit in the last place of subnormals."""
        return 2 - (1 << (self.exponent_bits - 1)) - self.fraction_bits

    def is_nan(self, p: int) -> bool:
        return self.abs(p) > self.inf

    def is_inf(self, p: int) -> bool:
        return self.abs(p) == self.inf

    def is_finite(self, p: int) -> bool:
        return self.abs(p) < self.inf

    def abs(self, p: int) -> int:
        return p & (self.sign - 1)

    def neg(self, p: int) -> int:
        return p ^ self.sign

    def split(self, p: int) -> tuple[int, int]:
        """|p| as (m, e) with |p| = m * 2^e, both ints; p is finite."""
        field, m = divmod(self.abs(p), 1 << self.fraction_bits)
        if field:
            return m + (1 << self.fraction_bits), field - 1 + self.lowest_exponent
        return m, self.lowest_exponent

    def value(self, p: int) -> Fraction:
        """The exact value of a finite p."""
        m, e = self.split(p)
        magnitude = Fraction(m << e) if e >= 0 else Fraction(m, 1 << -e)
        return -magnitude if p & self.sign else magnitude

    def scaled(self, sign: int, m: int, e: int) -> int:
        """(-1)^sign * m * 2^e, rounded to nearest even; m >= 0."""
        negative = self.sign if sign else 0
        if m == 0:
            return negative
        unit = max(m.bit_length() - 1 + e - self.fraction_bits, self.lowest_exponent)
        drop = unit - e
        if drop <= 0:
            kept = m << -drop
        else:
            kept, rest, half = m >> drop, m & ((1 << drop) - 1), 1 << (drop - 1)
            kept += rest > half or (rest == half and kept & 1)
        # a carry out of the fraction moves into the exponent by itself
        magnitude = ((unit - self.lowest_exponent) << self.fraction_bits) + kept
        return negative | min(magnitude, self.inf)

    def quotient(self, sign: int, num: int, den: int) -> int:
        """(-1)^sign * num / den, rounded to nearest even; num >= 0, den > 0."""
        shift = max(den.bit_length() - num.bit_length() + self.fraction_bits + 4, 0)
        q, r = divmod(num << shift, den)
        return self.scaled(sign, 2 * q + (r != 0), -shift - 1)

    def of(self, value: Fraction | int) -> int:
        """An exact rational, rounded once; zero is +0."""
        exact = Fraction(value)
        return self.quotient(int(exact < 0), abs(exact.numerator), exact.denominator)

    def add(self, a: int, b: int) -> int:
        if self.is_nan(a) or self.is_nan(b):
            return self.nan
        if self.is_inf(a) or self.is_inf(b):
            opposite = self.is_inf(a) and self.is_inf(b) and a != b
            return self.nan if opposite else (a if self.is_inf(a) else b)
        (ma, ea), (mb, eb) = self.split(a), self.split(b)
        e = min(ea, eb)
        part_a, part_b = ma << (ea - e), mb << (eb - e)
        total = (-part_a if a & self.sign else part_a) + (-part_b if b & self.sign else part_b)
        if total == 0:
            return self.sign if a & b & self.sign and ma == mb == 0 else 0
        return self.scaled(int(total < 0), abs(total), e)

    def sub(self, a: int, b: int) -> int:
        return self.add(a, self.neg(b))

    def mul(self, a: int, b: int) -> int:
        negative = (a ^ b) & self.sign
        zero = self.abs(a) == 0 or self.abs(b) == 0
        if self.is_nan(a) or self.is_nan(b) or (zero and (self.is_inf(a) or self.is_inf(b))):
            return self.nan
        if self.is_inf(a) or self.is_inf(b):
            return negative | self.inf
        (ma, ea), (mb, eb) = self.split(a), self.split(b)
        return self.scaled(int(negative != 0), ma * mb, ea + eb)

    def div(self, a: int, b: int) -> int:
        negative = (a ^ b) & self.sign
        zero_a, zero_b = self.abs(a) == 0, self.abs(b) == 0
        both = (zero_a and zero_b) or (self.is_inf(a) and self.is_inf(b))
        if self.is_nan(a) or self.is_nan(b) or both:
            return self.nan
        if self.is_inf(a) or zero_b:
            return negative | self.inf
        if zero_a or self.is_inf(b):
            return negative
        (ma, ea), (mb, eb) = self.split(a), self.split(b)
        e = ea - eb
        return self.quotient(int(negative != 0), ma << max(e, 0), mb << max(-e, 0))

    def less(self, a: int, b: int) -> bool:
        """a < b as numbers; False where either is NaN, and -0 equals +0."""
        if self.is_nan(a) or self.is_nan(b):
            return False
        return self.order(a) < self.order(b)

    def order(self, p: int) -> int:
        """An integer that is ordered as the numbers are."""
        return -self.abs(p) if p & self.sign else self.abs(p)

    def min(self, a: int, b: int) -> int:
        """The smaller of two numbers that are not NaN."""
        return b if self.less(b, a) else a


FP16 = Binary(5, 10)
BF16 = Binary(8, 7)
FP32 = Binary(8, 23)
FP64 = Binary(11, 52)

FMAX = FP32.largest
ZERO, ONE, NAN = 0, FP32.one, FP32.nan


def convert(p: int, source: Binary, target: Binary) -> int:
    """p of one format rounded to nearest even in another; a NaN is the default NaN of the target."""
    if source.is_nan(p):
        return target.nan
    negative = target.sign if p & source.sign else 0
    if source.is_inf(p):
        return negative | target.inf
    return target.scaled(int(negative != 0), *source.split(p))


def to_bf16(p: int) -> int:
    """BF16(x) of section 1: binary32 to bfloat16 and back."""
    return convert(convert(p, FP32, BF16), BF16, FP32)


def power_of_two(exponent: int) -> int:
    """2^exponent in binary32, exact for -149 <= exponent <= 127."""
    return FP32.scaled(0, 1, exponent)


def exponent_field(p: int) -> int:
    """E: bits 23-30."""
    return FP32.abs(p) >> 23


def fraction_field(p: int) -> int:
    """F: bits 0-22."""
    return p & 0x7FFFFF


def halving_tree(terms: list[int]) -> int:
    """Section 7.4: n terms, filled up with +0.0 to a power of two, added from the far half downwards."""
    n = 1 << (len(terms) - 1).bit_length() if terms else 1
    d = terms + [ZERO] * (n - len(terms))
    while n > 1:
        n //= 2
        d = [FP32.add(d[i], d[i + n]) for i in range(n)]
    return d[0]


def row_sum(terms: list[int]) -> int:
    """Section 7.4: ((d_0 + d_1) + d_2) + .. in order; +0.0 where there is no term."""
    if not terms:
        return ZERO
    total = terms[0]
    for term in terms[1:]:
        total = FP32.add(total, term)
    return total
