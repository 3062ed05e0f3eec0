"""Intervals over seeds are those of Student's t, also for two seeds, where two deviations are far off."""

import math
import random
import statistics

import pytest

from fourbits.compare.statistics.interval import margin, probability_within, t_quantile

# Two-sided 95 % points as printed in tables: M. Abramowitz and I. Stegun (1964), table 26.10, column 0.95.
PRINTED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "printed"), PRINTED.items())
def test_a_quantile_is_that_of_the_printed_tables(freedom: int, printed: float):
    assert t_quantile(freedom) == pytest.approx(printed, abs=0.0005)


def test_one_and_two_degrees_of_freedom_have_closed_forms():
    p = 0.95
    assert t_quantile(1) == pytest.approx(math.tan(math.pi / 2 * p), rel=1e-9)
    assert t_quantile(2) == pytest.approx(p * math.sqrt(2 / (1 - p**2)), rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 3, 8, 29])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_a_quantile_holds_its_probability(freedom: int, confidence: float):
    assert probability_within(t_quantile(freedom, confidence), freedom) == pytest.approx(confidence, abs=1e-9)


def test_the_margin_of_two_values_is_over_six_times_two_deviations_of_their_mean():
    values = [0.010, 0.014]
    deviation = statistics.stdev(values) / math.sqrt(2)
    assert margin(values) == pytest.approx(12.7062 * deviation, rel=1e-4)


def test_one_value_has_no_margin():
    assert margin([0.3]) is None


@pytest.mark.parametrize("n", [2, 3])
def test_the_interval_covers_the_expected_value_in_95_of_100_cases(n: int):
    rng, cases = random.Random(n), 4000
    covered = 0
    for _ in range(cases):
        values = [rng.gauss(1.0, 2.0) for _ in range(n)]
        covered += abs(statistics.fmean(values) - 1.0) <= (margin(values) or 0.0)
    # Four standard deviations of a count of 4000 with probability 0.95.
    assert covered / cases == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / cases))
