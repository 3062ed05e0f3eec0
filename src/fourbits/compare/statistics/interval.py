"""Confidence intervals of a mean over few seeds, by Student's t distribution."""

import math
import statistics
from collections.abc import Sequence
from functools import cache

CONFIDENCE = 0.95


def margin(values: Sequence[float], confidence: float = CONFIDENCE) -> float | None:
    """Half the width of the interval around the mean that contains the expected value with this confidence.

    None below two values. Assumes independent, normally distributed values.
    """
    n = len(values)
    if n < 2:
        return None
    return t_quantile(n - 1, confidence) * statistics.stdev(values) / math.sqrt(n)


@cache
def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t for which a Student's t variable lies within [-t, t] with this probability.

    freedom: degrees of freedom, n - 1 for n values. Bisection of `probability_within`, to 1e-12 relative.
    """
    low, high = 0.0, 1.0
    while probability_within(high, freedom) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if probability_within(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def probability_within(t: float, freedom: int) -> float:
    """Probability that |T| <= t: the finite series for whole degrees of freedom.

    M. Abramowitz and I. Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def standard_deviation(values: Sequence[float]) -> float | None:
    """Of a sample; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None
