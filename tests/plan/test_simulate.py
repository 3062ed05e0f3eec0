"""Simulated runs: the closed form's mean, every second accounted for, and what assumptions change."""

import random
import statistics

import pytest

from fourbits.plan.failures import Failures
from fourbits.plan.simulate import Cluster, sensitivity, simulate, slowest

FAILURES = Failures(between=20_000.0, restart=600.0, checkpoint=30.0)
RUN = Cluster(step=2.0, steps=200_000, interval=500, gpus=1024, failures=FAILURES)


def test_the_mean_is_that_of_the_closed_form():
    totals = [simulate(RUN, seed).total for seed in range(40)]
    expected = RUN.steps * RUN.step * FAILURES.slowdown(RUN.interval * RUN.step)
    # 40 runs of some 22 failures each: their mean's standard error, four times.
    error = 4 * statistics.stdev(totals) / 40**0.5
    assert error < 0.02 * expected
    assert statistics.mean(totals) == pytest.approx(expected, abs=error)


def test_a_seed_repeats_a_run_and_another_does_not():
    assert simulate(RUN, 1) == simulate(RUN, 1) != simulate(RUN, 2)


def test_every_second_goes_somewhere():
    found = simulate(RUN, 3)
    assert found.computing == RUN.steps * RUN.step
    assert found.checkpoints == RUN.steps / RUN.interval * 30.0
    assert found.failures > 0
    assert 0 < found.repeated <= found.failures * (RUN.interval * RUN.step + 30)
    assert found.restarts >= 600.0


def test_a_step_waits_for_the_slowest_gpu():
    jittery = Cluster(step=1.0, steps=1, interval=1, gpus=1000, failures=FAILURES, jitter=0.05)
    generator = random.Random(0)
    drawn = [max(generator.gauss(1, 0.05) for _ in range(1000)) for _ in range(300)]
    assert slowest(jittery) == pytest.approx(statistics.mean(drawn), rel=0.01)
    slow = Cluster(step=1.0, steps=1, interval=1, gpus=1000, failures=FAILURES, slow=1, slowdown=1.5)
    assert slowest(slow) == 1.5


def test_sensitivities_have_the_signs_of_what_they_change():
    found = {each.what: each.change for each in sensitivity(RUN)}
    assert found.pop("as assumed") == 0
    assert min(found.values()) > 0
    assert found["one GPU at 0.9 of its speed"] > 0.09
