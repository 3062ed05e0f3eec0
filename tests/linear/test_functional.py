"""torch.func.grad gives the bits of a backward pass; vmap and jvp raise one error; FLOPs are counted."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

from fourbits.func_transforms import UnsupportedTransformError
from fourbits.linear.convert import convert
from fourbits.linear.step import counters_of, set_step
from support.assertions import assert_same_bytes
from support.straight_through import grad_of

RECIPES = ["nvfp4", "nvfp4-46", "quartet2", "fp8"]


def converted(recipe: str = "nvfp4") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    convert(model, recipe)
    return model


def loss_of(model: nn.Module, x: torch.Tensor) -> Any:
    return lambda parameters: functional_call(model, parameters, (x,)).square().mean()


@pytest.mark.parametrize("recipe", RECIPES)
def test_grad_has_the_bits_of_a_backward_pass(recipe):
    model, x = converted(recipe), torch.randn(16, 32)
    set_step(model, 3)
    found = grad(loss_of(model, x))(dict(model.named_parameters()))
    set_step(model, 3)
    model(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert_same_bytes(found[name], grad_of(parameter))


def test_vjp_gives_the_gradient_of_the_input():
    model, x = converted(), torch.randn(16, 32)
    set_step(model, 0)
    (found,) = vjp(lambda x: model(x).sum(), x)[1](torch.tensor(1.0))
    set_step(model, 0)
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    assert_same_bytes(found, grad_of(leaf))


@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: vmap(grad(lambda row: model(row).sum()))(x[:, None]),
        lambda model, x: vmap(model)(x[:, None]),
        lambda model, x: jvp(model, (x,), (x,)),
        lambda model, x: jacrev(lambda x: model(x).sum(0))(x),
    ],
    ids=["vmap of grad", "vmap", "jvp", "jacrev"],
)
def test_vmap_and_jvp_raise_one_error_by_name(transform):
    model = converted()
    set_step(model, 0)
    with pytest.raises(UnsupportedTransformError, match=r"vmap and jvp are not supported.*grad and vjp are"):
        transform(model, torch.randn(16, 32))


def test_a_second_derivative_raises_as_in_a_backward_pass():
    model, x = converted(), torch.randn(16, 32)
    set_step(model, 0)
    inner = grad(lambda x: model(x).square().sum())
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        grad(lambda x: inner(x).sum())(x)


@pytest.mark.filterwarnings("ignore:.*set_step was never called")
def test_without_set_step_a_call_of_grad_advances_the_layers_own_counter():
    model, x = converted(), torch.randn(16, 32)
    for steps in (1, 2):
        grad(loss_of(model, x))(dict(model.named_parameters()))
        assert [int(counter[1]) for counter in counters_of(model)] == [steps, steps]


@pytest.mark.filterwarnings("ignore:.*set_step was never called")
@pytest.mark.parametrize("needs_dx", [True, False])
def test_flops_are_those_of_the_three_gemms_as_for_nn_linear(needs_dx):
    counts = []
    for recipe in ("bf16", "nvfp4"):
        model = nn.Sequential(nn.Linear(32, 48))
        convert(model, recipe)
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(16, 32, requires_grad=needs_dx)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts == [(2 + needs_dx) * 2 * 16 * 32 * 48] * 2
