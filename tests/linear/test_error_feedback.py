"""Layers whose input has error feedback: coefficients follow the weight, and a resumed run its checkpoint."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fourbits.linear.checkpoint_state import load_recipe_state, recipe_state
from fourbits.linear.convert import convert
from fourbits.linear.monitor.health import health
from fourbits.linear.step import set_step
from fourbits.model.experts import GroupedLinear
from fourbits.quant.feedback_coefficients import feedback_coefficients
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe

BASE = get_recipe("quartet2-46")
RECIPE = replace(
    BASE,
    name="feedback",
    fprop=replace(BASE.fprop, lhs=replace(BASE.fprop.lhs, error_feedback=64, feedback_interval=10)),
    wgrad=replace(BASE.wgrad, rhs=replace(BASE.wgrad.rhs, source="as_is")),
)


def model(recipe: Recipe | str = RECIPE) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 96))
    convert(layers, recipe)
    return layers


def inputs() -> torch.Tensor:
    return torch.randn(64, 96, generator=torch.Generator().manual_seed(1))


def coefficients(layers: Any) -> list[torch.Tensor]:
    return [layer.quantization.feedback.coefficients for layer in (layers[0], layers[2])]


def train(layers: Any, first: int, last: int) -> None:
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    for step in range(first, last):
        set_step(layers, step)
        optimizer.zero_grad()
        (layers(inputs()) - inputs()).square().mean().backward()
        optimizer.step()


def test_the_output_errs_less_than_without():
    exact = model("bf16")(inputs())
    errors = []
    for recipe in (RECIPE, BASE):
        layers = model(recipe)
        set_step(layers, 0)
        errors.append((layers(inputs()) - exact).norm())
    assert errors[0] < errors[1]


def test_coefficients_are_those_of_the_weight_at_the_steps_that_are_due():
    layers = model()
    train(layers, 0, 4)
    assert all(layer.quantization.feedback.step == 2 for layer in (layers[0], layers[2]))
    set_step(layers, 4)
    assert torch.equal(coefficients(layers)[0], feedback_coefficients(layers[0].weight, 64))
    with torch.no_grad():
        layers[0].weight.mul_(torch.linspace(1, 3, 96))
    before, address = coefficients(layers)[0].clone(), coefficients(layers)[0].data_ptr()
    set_step(layers, 9)  # not due
    assert torch.equal(coefficients(layers)[0], before)
    set_step(layers, 10)
    assert not torch.equal(coefficients(layers)[0], before)
    assert coefficients(layers)[0].data_ptr() == address  # which a CUDA graph reads


def test_micro_batches_of_a_step_share_coefficients():
    layers = model()
    set_step(layers, 0)
    before = coefficients(layers)[0].clone()
    with torch.no_grad():
        layers[0].weight.normal_()
    set_step(layers, 0, first_token=64)
    assert torch.equal(coefficients(layers)[0], before)


def test_compiled_layers_give_the_same_bits():
    eager, traced = model(), model()
    compiled = torch.compile(traced, fullgraph=True)
    for layers, call in ((eager, eager), (traced, compiled)):
        set_step(layers, 0)
        call(inputs()).square().mean().backward()
    set_step(eager, 1)
    set_step(traced, 1)
    assert torch.equal(eager(inputs()), compiled(inputs()))
    for own, other in zip(eager.parameters(), traced.parameters(), strict=True):
        assert own.grad is not None
        assert torch.equal(own.grad, other.grad)


def test_a_gradient_by_torch_func_is_that_of_backward():
    layers = model()
    set_step(layers, 0)
    parameters = dict(layers.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(layers, parameters, (inputs(),)).square().mean()

    found = torch.func.grad(loss)(parameters)
    layers(inputs()).square().mean().backward()
    assert torch.equal(found["0.weight"], layers[0].weight.grad)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted():
    whole, first, second = model(), model(), model()
    train(whole, 0, 8)
    train(first, 0, 6)
    second.load_state_dict(first.state_dict())
    load_recipe_state(second, recipe_state(first))
    train(second, 6, 8)
    for own, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(own, other)


def test_coefficients_lie_column_by_column_but_not_in_a_checkpoint():
    long = replace(RECIPE, fprop=replace(RECIPE.fprop, lhs=replace(RECIPE.fprop.lhs, error_feedback=2048)))
    first, second = model(long), model(long)
    train(first, 0, 1)
    state = recipe_state(first)
    load_recipe_state(second, state)
    for layers in (first, second):
        for name, width, known in zip(("0", "2"), (96, 160), coefficients(layers), strict=True):
            assert (known.shape, known.stride()) == ((width, width), (1, width))
            assert torch.equal(known, state[f"{name}.coefficients"])
    assert all(entry.is_contiguous() for entry in state.values())


def test_a_checkpoint_without_coefficients_is_refused():
    state = recipe_state(model())
    assert [key for key in state if key.endswith("coefficients")] == ["0.coefficients", "2.coefficients"]
    del state["0.coefficients"]
    with pytest.raises(ValueError, match="does not fit"):
        load_recipe_state(model(), state)


def test_a_call_before_the_first_set_step_is_refused():
    with pytest.raises(ValueError, match="set_step"):
        model()(inputs())


def test_stacked_experts_are_refused():
    with pytest.raises(ValueError, match="experts"):
        convert(nn.Sequential(GroupedLinear(2, 64, 64)), RECIPE)


def test_a_weight_without_values_has_no_coefficients_until_it_has_values():
    """An export reads a model's recipe from the meta device."""
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(64, 64, bias=False))
    convert(layers, RECIPE)
    set_step(layers, 0)
    with pytest.raises(ValueError, match="takes its coefficients from the weight"):
        layers(torch.empty(16, 64, device="meta"))
    layers.to_empty(device="cpu")
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    set_step(layers, 0)
    assert layers(torch.ones(16, 64)).isfinite().all()


def test_health_samples_the_product_as_it_is_computed():
    snr = []
    for recipe in (RECIPE, BASE):
        layers = model(recipe)
        set_step(layers, 0)
        with health(layers) as report:
            layers(inputs()).square().mean().backward()
        snr.append(report.layers[0].snr_db["fprop"])
    assert snr[0] > snr[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dgrad": RECIPE.fprop}, "dgrad.lhs.error_feedback"),
        ({"wgrad": BASE.wgrad}, "wgrad.rhs.source: forward"),
    ],
)
def test_tables_that_cannot_have_it_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RECIPE, **change)
