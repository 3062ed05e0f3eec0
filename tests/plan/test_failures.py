"""Failures: Daly's interval is the best one, and limits are the ones of the formula."""

import pytest

from fourbits.plan.failures import HOURS_BETWEEN_FAILURES, Failures, failures_of


@pytest.mark.parametrize(("between", "checkpoint"), [(1e5, 10.0), (1e4, 60.0), (3e3, 100.0)])
def test_no_interval_loses_much_less_than_the_best(between, checkpoint):
    found = Failures(between=between, restart=300.0, checkpoint=checkpoint)
    best = found.best_interval
    others = [found.lost(best * 1.1**power) for power in range(-20, 21)]
    assert found.lost(best) == pytest.approx(min(others), rel=2e-3)


def test_youngs_interval_is_the_limit_of_rare_failures():
    found = Failures(between=1e9, restart=0.0, checkpoint=1.0)
    assert found.best_interval == pytest.approx((2 * 1e9) ** 0.5, rel=1e-4)


def test_without_failures_only_checkpoints_cost_time():
    found = Failures(between=1e15, restart=600.0, checkpoint=5.0)
    assert found.lost(95.0) == pytest.approx(0.05, rel=1e-6)


def test_failures_come_with_the_number_of_gpus():
    found = failures_of(1000, parameters=1e9, storage=1e9)
    assert found.between == pytest.approx(HOURS_BETWEEN_FAILURES * 3.6)
    assert found.checkpoint == 12.0
    assert failures_of(1000, parameters=1e9, background=True).checkpoint == 12e9 / (1000 * 25e9)


def test_an_interval_of_hundreds_of_failures_loses_all_of_the_time():
    found = Failures(between=100.0, restart=300.0, checkpoint=10.0)
    assert 0.5 < found.lost(50.0) < 1.0
    assert found.lost(1e5) == found.lost(1e9) == 1.0
