"""Running means, gaps and shared steps."""

import numpy as np

from fourbits.compare.report.curves import common_steps, relative_gap, smooth


def test_smoothing_keeps_a_straight_line_where_the_window_is_complete():
    line = np.linspace(5.0, 3.0, 101)
    np.testing.assert_allclose(smooth(line, 11)[5:-5], line[5:-5], rtol=1e-12)


def test_windows_at_the_ends_are_shorter():
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0], 3).tolist() == [1.5, 2.0, 3.0, 4.0, 4.5]


def test_smoothing_reduces_noise_by_the_root_of_the_window():
    noise = np.random.default_rng(0).standard_normal(20_000)
    # The mean of 25 independent values has a standard deviation of 1/5; 20,000 of them give it within 5 %.
    assert abs(smooth(noise, 25).std() - 1 / 5) < 0.05 / 5


def test_the_mean_is_nan_from_the_first_non_finite_value_onwards():
    curve = smooth([3.0, 3.0, 3.0, np.inf, 3.0, 3.0, 3.0, 3.0], 3)
    assert curve[:2].tolist() == [3.0, 3.0]
    assert np.isnan(curve[2:]).all()


def test_a_relative_gap_is_in_per_cent_of_the_baseline():
    np.testing.assert_allclose(relative_gap([4.04, 1.99], [4.0, 2.0]), [1.0, -0.5])


def test_common_steps_are_the_steps_of_every_run():
    runs = [np.array([8, 16, 24, 32]), np.array([16, 32, 48]), np.array([16, 24, 32])]
    assert common_steps(runs).tolist() == [16, 32]
