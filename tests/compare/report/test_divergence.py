"""The divergence detector: which runs it calls diverged, and at which step."""

import numpy as np
import pytest

from fourbits.compare.report.divergence import judge

STEPS = np.arange(1, 401)


def learning_curve(seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(len(STEPS))
    return 3.4 + 4 * np.exp(-STEPS / 40) + 0.08 * noise


def test_a_run_a_few_per_cent_above_its_baseline_is_stable():
    assert judge(STEPS, 1.04 * learning_curve(), learning_curve()).verdict == "stable"


def test_a_run_that_leaves_its_baseline_for_good_diverged_where_it_left():
    curve = learning_curve()
    curve[199:] += 0.02 * np.arange(201)
    finding = judge(STEPS, curve, learning_curve())
    # 10 % above 3.43 nats is 0.34, reached 17 steps after step 200; the mean over 16 steps blurs by 8.
    assert finding.verdict == "diverged"
    assert finding.step is not None
    assert abs(finding.step - 217) <= 8


def test_a_run_that_recovers_had_a_spike_at_its_peak():
    curve = learning_curve()
    curve[249:270] += 2.0
    finding = judge(STEPS, curve, learning_curve())
    assert finding.verdict == "spike"
    assert finding.step is not None
    assert 250 <= finding.step <= 270


def test_a_non_finite_loss_is_divergence_whatever_follows():
    curve = learning_curve()
    curve[120] = np.nan
    finding = judge(STEPS, curve, learning_curve())
    assert (finding.verdict, finding.step) == ("diverged", 121)


def test_a_new_data_phase_that_shifts_both_runs_is_not_divergence():
    shift = np.where(STEPS > 280, 0.6, 0.0)
    assert judge(STEPS, learning_curve() + shift, learning_curve(1) + shift).verdict == "stable"


def test_without_a_baseline_a_run_is_compared_with_its_own_minimum():
    lost = learning_curve()
    lost[299:] = 7.5
    assert judge(STEPS, lost).verdict == "diverged"
    assert judge(STEPS, learning_curve()).verdict == "stable"


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_run_of_a_few_steps_can_be_judged(length: int):
    assert judge(STEPS[:length], learning_curve()[:length]).verdict == "stable"
