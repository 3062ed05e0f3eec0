"""AdamW on masters: the published update, the groups, clipping, and non-finite steps."""

import pytest
import torch
from torch import nn

from fourbits.model.lm import LanguageModel
from fourbits.model.presets import MODEL_PRESETS
from fourbits.train.config import OptimConfig
from fourbits.train.optim import MasterOptimizer, decays

CONFIG = OptimConfig(lr=1e-2, grad_clip=None, weight_decay=0.5)
FREE = torch.zeros(())


def parameters():
    generator = torch.Generator().manual_seed(1)
    return {
        "matrix": nn.Parameter(torch.randn(5, 3, generator=generator)),
        "gain": nn.Parameter(torch.randn(7, generator=generator)),
    }


def give_gradients(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params.values():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def test_the_update_is_adamw_and_only_matrices_decay():
    params, expected = parameters(), {name: p.detach().double() for name, p in parameters().items()}
    optimizer = MasterOptimizer(params, CONFIG)
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step in range(1, 6):
        give_gradients(params, step)
        grads = {name: p.grad.double() for name, p in params.items() if p.grad is not None}
        optimizer.step(0.01 * step, FREE, FREE)
        for name, grad in grads.items():
            expected[name] *= 1 - 0.01 * step * (0.5 if name == "matrix" else 0.0)
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            corrected = (second[name] / (1 - 0.95**step)).sqrt() + 1e-8
            expected[name] -= 0.01 * step * first[name] / (1 - 0.9**step) / corrected
    for name, parameter in params.items():
        # A dozen FP32 operations a step on values of order one.
        torch.testing.assert_close(parameter.double(), expected[name], rtol=0, atol=5 * 12 * 2**-24)


def test_vectors_do_not_decay_and_everything_else_does():
    model = LanguageModel(MODEL_PRESETS["tiny"])
    undecayed = {name.rsplit(".", 1)[-1] for name, p in model.named_parameters() if not decays(p)}
    assert undecayed == {"weight", "conv_bias", "dt_bias", "A_log", "D", "norm_weight"}
    norms = {name for name, p in model.named_parameters() if not decays(p) and name.endswith(".weight")}
    assert all("norm" in name for name in norms)
    assert decays(model.embed.weight)
    assert decays(model.head.weight)


def test_the_norm_is_from_before_clipping_and_the_update_from_the_clipped_gradient():
    clipped, scaled = parameters(), parameters()
    give_gradients(clipped, 0)
    norm = float(torch.cat([p.grad.flatten() for p in clipped.values() if p.grad is not None]).norm())
    numbers = MasterOptimizer(clipped, OptimConfig(grad_clip=norm / 4)).step(1e-2, FREE, FREE)
    give_gradients(scaled, 0, scale=0.25)
    MasterOptimizer(scaled, OptimConfig(grad_clip=None)).step(1e-2, FREE, FREE)
    assert float(numbers[1]) == pytest.approx(norm, rel=2**-20)
    for name, parameter in clipped.items():
        torch.testing.assert_close(parameter, scaled[name], rtol=0, atol=1e-2 * 2**-18)


def test_a_small_gradient_is_not_clipped():
    one, other = parameters(), parameters()
    for params, clip in ((one, 1e6), (other, None)):
        give_gradients(params, 0)
        MasterOptimizer(params, OptimConfig(grad_clip=clip)).step(1e-2, FREE, FREE)
    assert all(torch.equal(p, other[name]) for name, p in one.items())


@pytest.mark.parametrize(
    ("loss", "blocked", "gradient"),
    [(float("nan"), 0.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, float("inf")), (0.0, 0.0, float("nan"))],
)
def test_a_blocked_or_non_finite_step_changes_no_bit(loss, blocked, gradient):
    params = parameters()
    optimizer = MasterOptimizer(params, OptimConfig())
    give_gradients(params, 0)
    optimizer.step(1e-2, FREE, FREE)
    before = {name: t.clone() for name, t in {**params, **optimizer.state()}.items()}
    give_gradients(params, 1)
    params["gain"].grad = torch.full((7,), gradient)
    numbers = optimizer.step(1e-2, torch.tensor(loss), torch.tensor(blocked))
    assert float(numbers[0]) == 1
    after = {**params, **optimizer.state()}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert params["gain"].grad is None


def test_the_numbers_name_the_parameter_that_is_not_finite():
    params = parameters()
    give_gradients(params, 0)
    params["gain"].grad = torch.full((7,), float("nan"))
    norms = MasterOptimizer(params, OptimConfig()).step(1e-2, FREE, FREE)[2:]
    assert norms.isfinite().tolist() == [True, False]


def test_a_loaded_state_continues_with_the_same_bits():
    straight, first = parameters(), parameters()
    one, two = MasterOptimizer(straight, OptimConfig()), MasterOptimizer(first, OptimConfig())
    for step in range(3):
        for params, optimizer in ((straight, one), (first, two)):
            give_gradients(params, step)
            optimizer.step(1e-2, FREE, FREE)
    second = {name: nn.Parameter(p.detach().clone()) for name, p in first.items()}
    three = MasterOptimizer(second, OptimConfig())
    three.load_state({name: value.clone() for name, value in two.state().items()})
    for params, optimizer in ((straight, one), (second, three)):
        give_gradients(params, 3)
        optimizer.step(1e-2, FREE, FREE)
    assert all(torch.equal(p, second[name]) for name, p in straight.items())
