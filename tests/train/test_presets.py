"""Presets at full size with their recipe: the paper's BF16 layers, and a gradient for every parameter."""

import pytest
import torch

from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.model.lm import LanguageModel
from fourbits.train.presets import RUN_PRESETS
from fourbits.train.schedule import learning_rate

PAPER = {
    # peak rate, share of steps that decay, linear layers in BF16 besides the head: arXiv:2509.25149 section 5
    "hybrid-12b": (
        4.5e-4,
        0.2,
        20,
    ),  # 10 blocks of 2 linear layers
    "hybrid-8b": (8e-4, 0.15, None),
    "transformer-1.2b": (1.2e-3, 0.15, None),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_runs_have_its_rates_and_decay(name):
    optim = RUN_PRESETS[name].optim
    peak, decay, _ = PAPER[name]
    rates = [learning_rate(step, 1000, optim) for step in range(1000)]
    assert max(rates) == peak
    assert rates[-1] == pytest.approx(peak / 100)
    assert sum(rate < peak for rate in rates[500:]) == 1000 * decay
    assert (optim.betas, optim.weight_decay) == ((0.9, 0.95), 0.1)


@pytest.mark.parametrize(
    "name", ["hybrid-12b", "hybrid-8b", "transformer-1.2b", "nemotron-nano-12b-v2", "1b"]
)
def test_a_step_at_size_has_a_gradient_for_every_parameter(name):
    config = RUN_PRESETS[name]
    with torch.device("meta"):
        model = LanguageModel(config.model)
        tokens = torch.zeros(1, 32, dtype=torch.int64)
    summary = convert(model, config.recipe)
    kept = PAPER.get(name, (0, 0, None))[2]
    if kept is not None:
        assert sum(not row.quantized for row in summary.rows) == kept + 1
    set_step(model, 0)
    model.loss(tokens, tokens)[0].backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.shape == parameter.shape
