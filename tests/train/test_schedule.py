import math
from dataclasses import replace

import pytest

from fourbits.train.config import OptimConfig
from fourbits.train.schedule import learning_rate

CONFIG = OptimConfig(lr=2.0, warmup_share=0.1, decay_share=0.2, final_lr_factor=0.25)


def rates(num_steps, config=CONFIG):
    return [learning_rate(step, num_steps, config) for step in range(num_steps)]


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert rates(40)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_the_rate_is_constant_between_warm_up_and_decay():
    assert set(rates(40)[4:32]) == {2.0}


def test_decay_is_linear_and_its_last_step_runs_at_the_final_factor():
    decay = rates(40)[32:]
    steps = [before - after for before, after in zip([2.0, *decay], decay, strict=False)]
    assert decay[-1] == 0.25 * 2.0
    assert steps == pytest.approx([(2.0 - 0.5) / 8] * 8, rel=1e-12)


def test_a_cosine_decay_is_half_a_period_and_ends_at_the_final_factor():
    decay = rates(40, replace(CONFIG, decay="cosine"))[32:]
    half = [2.0 * (0.25 + 0.75 * (1 + math.cos(math.pi * step / 8)) / 2) for step in range(1, 9)]
    assert decay == pytest.approx(half, rel=1e-12)
    assert decay[3] == pytest.approx(2.0 * (1 + 0.25) / 2, rel=1e-12)
    assert decay[-1] == 0.25 * 2.0


def test_without_warm_up_and_decay_the_rate_is_constant():
    config = OptimConfig(lr=3e-4, warmup_share=0.0, decay_share=0.0)
    assert set(rates(7, config)) == {3e-4}


@pytest.mark.parametrize("num_steps", range(1, 12))
def test_any_number_of_steps_has_positive_rates_up_to_the_peak(num_steps):
    config = OptimConfig(lr=1.0, warmup_share=0.5, decay_share=0.5, final_lr_factor=0.1)
    assert all(0.1 <= rate <= 1.0 for rate in rates(num_steps, config))
