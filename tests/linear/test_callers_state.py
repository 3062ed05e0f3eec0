"""Outputs, gradients and the recipe's state do not depend on the caller's default dtype or device."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from fourbits.linear import sr_counter
from fourbits.linear.checkpoint_state import recipe_state
from fourbits.linear.convert import convert
from fourbits.linear.set_recipe import set_recipe
from fourbits.linear.step import set_step
from fourbits.recipe.presets import get_recipe, list_recipes
from fourbits.recipe.recipe import Recipe
from fourbits.settings import override
from support.assertions import assert_same_bytes
from support.callers_state import STATES
from support.straight_through import ROLES, grad_of

DEFAULTS = [name for name in STATES if name.startswith("default")]
DELAYED = {"amax_policy": "delayed"}
HISTORY = {"amax_policy": "history", "amax_history": 3}
ADAPTIVE = ["nvfp4 delayed", "nvfp4 history"]
#: dY has a row so large that limited rows scale it down
LARGE_ROW = 3


def recipe_of(name: str) -> Recipe:
    shipped, _, policy = name.partition(" ")
    kept = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0}
    fields = {"": {}, "delayed": DELAYED, "history": HISTORY}[policy]
    return override(
        get_recipe(shipped), kept | {f"{role}.{key}": v for role in ROLES for key, v in fields.items()}
    )


def two_steps(name: str, state: AbstractContextManager[object]) -> dict[str, Tensor]:
    """Everything that two steps of a converted layer compute; only the inputs are made outside of `state`."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    x = torch.randn(32, 64, generator=generator).requires_grad_()
    dy = torch.randn(32, 64, generator=generator)
    dy[LARGE_ROW] *= 4096
    found: dict[str, Tensor] = {}
    with state:
        summary = convert(model, recipe_of(name), seed=1)
        for step in range(2):
            set_step(model, step)
            y = model(x)
            y.backward(dy)
            found |= {f"y {step}": y.detach(), f"dx {step}": grad_of(x).clone()}
        text = str(summary)
        found |= {f"state {key}": value for key, value in recipe_state(model).items()}
    assert text
    found |= {f"grad {key}": grad_of(parameter) for key, parameter in model.named_parameters()}
    return found


@pytest.mark.parametrize("state", DEFAULTS)
@pytest.mark.parametrize("name", [*list_recipes(), *ADAPTIVE])
def test_two_steps_have_the_same_bits(name, state):
    expected = two_steps(name, nullcontext())
    found = two_steps(name, STATES[state]())
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert (value.dtype, value.device) == (expected[key].dtype, expected[key].device), key
        assert_same_bytes(value, expected[key])
    if name in ADAPTIVE:
        assert any(key.startswith("state") for key in found)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("own_steps", [False, True], ids=["set_step", "own steps"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 delayed"])
def test_what_ran_in_inference_mode_before_changes_no_bit_of_training(name, own_steps, compiled, monkeypatch):
    """convert, set_recipe, set_step and a call; training then writes and saves what they have made."""
    monkeypatch.setattr(sr_counter, "_warned", [True])
    found: list[list[Tensor]] = []
    for before in (nullcontext(), torch.inference_mode()):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
        run = torch.compile(model, backend="aot_eager") if compiled else model
        x = torch.randn(32, 64)
        with before:
            convert(model, "fp8", seed=1)
            set_recipe(model, recipe_of(name))
            if not own_steps:
                set_step(model, 0)
            with torch.no_grad():
                run(x)
        for step in range(2):
            if step and not own_steps:
                set_step(model, step)
            run(x).square().sum().backward()
        found.append([grad_of(parameter) for parameter in model.parameters()])
    for got, want in zip(*found, strict=True):
        assert_same_bytes(got, want)
