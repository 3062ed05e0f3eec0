"""Weights that servers compute as one matrix share an amax, from the second step on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourbits.linear.amax_policy import IN_USE
from fourbits.linear.checkpoint_state import load_recipe_state, recipe_state
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.settings import override
from support.straight_through import ROLES


def projections() -> nn.Module:
    """Two modules with the same names, of different magnitudes."""
    torch.manual_seed(3)
    blocks = [nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in "qko"}) for _ in range(2)]
    model = nn.ModuleDict({"first": blocks[0], "second": blocks[1]})
    with torch.no_grad():
        for scale, parameter in enumerate(model.parameters(), 1):
            parameter.mul_(scale)
    return model


SHARED = {
    "fprop.rhs.amax_policy": "delayed",
    "dgrad.rhs.amax_policy": "delayed",
    "keep_bf16.first_blocks": 0,
    "keep_bf16.last_blocks": 0,
    "shared_weight_amax": [["q", "k"]],
}


def shared(**changes: Any) -> Recipe:
    return override(get_recipe("nvfp4"), SHARED | changes)


def call(model: Any, x: Tensor) -> None:
    torch.stack([layer(x).sum() for block in model.values() for layer in block.values()]).sum().backward()


def in_use_of(layer: nn.Linear) -> float:
    state: Any = layer.quantization
    return float(state.recipe_state.amaxes[state.slot, ROLES.index("fprop.rhs"), IN_USE])


def test_weights_of_a_group_use_their_largest_amax_in_each_module():
    """From the second step on; before, each measures its own."""
    model: Any = projections()
    convert(model, shared(), stacks=[])
    own = {
        name: {key: float(layer.weight.detach().bfloat16().abs().max()) for key, layer in block.items()}
        for name, block in model.items()
    }
    for step in range(3):
        set_step(model, step)
        for name, block in model.items():
            expected = {**own[name], **dict.fromkeys("qk", max(own[name]["q"], own[name]["k"]))}
            found = {key: in_use_of(layer) for key, layer in block.items()}
            assert found == (expected if step else dict.fromkeys("qko", -1.0))
        call(model, torch.randn(16, 32))
    saved = recipe_state(model)
    again: Any = projections()
    convert(again, shared(), stacks=[])
    load_recipe_state(again, saved)
    set_step(again, 3)
    set_step(model, 3)
    assert [in_use_of(b[k]) for b in again.values() for k in b] == [
        in_use_of(b[k]) for b in model.values() for k in b
    ]


def test_shared_amaxes_need_set_step_and_a_policy():
    model: Any = projections()
    convert(model, shared(), stacks=[])
    with pytest.raises(
        ValueError, match="shared amaxes are chosen between optimizer steps, so they need set_st"
    ):
        call(model, torch.randn(16, 32))
    for changes, message in (
        ({"fprop.rhs.amax_policy": "current"}, "fprop.rhs.amax_policy must be delayed or history"),
        ({"shared_weight_amax": [["q"]]}, "each group must have two or more names"),
        ({"shared_weight_amax": [["q", "k"], ["k", "o"]]}, "no name twice"),
    ):
        with pytest.raises(ValueError, match=message):
            shared(**changes)


def test_a_recipe_that_shares_nothing_has_the_hash_that_it_had_before_sharing_existed():
    assert get_recipe("nvfp4").digest == "2cb0b0fe22f75ccb"
    assert shared().digest != shared(shared_weight_amax=[]).digest
