"""A recipe that changes at a step: what operands have tracked goes on where its meaning is unchanged."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourbits import set_recipe
from fourbits.linear.amax_history import RecipeState
from fourbits.linear.amax_policy import COUNT, HISTORY, IN_USE, LAYOUT, PENDING
from fourbits.linear.amax_reduction import register_amax_reduction
from fourbits.linear.checkpoint_state import load_recipe_state, recipe_state, recipe_states_of
from fourbits.linear.convert import convert
from fourbits.linear.feature_shard import shard_features
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.step import counters_of, set_step
from fourbits.linear.weight_source import set_weight_source
from fourbits.quant.quantize import quantize
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import Recipe
from fourbits.settings import override
from support.assertions import assert_same_bytes
from support.straight_through import ROLES, grad_of

SWITCH = 4  # the step that the second recipe begins with
register_amax_reduction("one shard", lambda bits, roles: bits)


def recipe_of(history: int = 3, **changes: Any) -> Recipe:
    policy = {
        f"{r}.{k}": v for r in ROLES for k, v in (("amax_policy", "history"), ("amax_history", history))
    }
    whole = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0}
    return override(get_recipe("nvfp4"), {**policy, **whole, **changes})


FIRST = recipe_of()
#: keeps all histories but Wgrad's, whose tensors get another transform
_CHANGES = {
    "wgrad.lhs.rht": 32,
    "wgrad.rhs.rht": 32,
    "dgrad.lhs.rounding": "rne",
    "fprop.lhs.amax_headroom": 2.0,
}
SECOND = override(recipe_of(history=2), _CHANGES)


def model_of(recipe: Recipe | str | None = FIRST) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32, bias=False))
    if recipe is not None:
        convert(model, recipe, seed=7)
    return model


def train(model: nn.Module, step: int) -> list[Tensor]:
    """y, dX and the gradients of a step, after which weights move."""
    set_step(model, step, 64 * step)
    generator = torch.Generator().manual_seed(step)
    x, dy = (2.0 ** ((7 * step) % 5) * torch.randn(64, 32, generator=generator) for _ in range(2))
    model.zero_grad()
    leaf = x.requires_grad_()
    y = model(leaf)
    y.backward(dy)
    found = [y.detach(), grad_of(leaf), *(grad_of(p).clone() for p in model.parameters())]
    with torch.no_grad():
        for p in model.parameters():
            p -= 1e-3 * grad_of(p)
    return found


def assert_equal_steps(actual: list[Tensor], expected: list[Tensor]) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert_same_bytes(got, wanted)


def state_of_recipe(model: nn.Module) -> RecipeState:
    (tracked,) = recipe_states_of(model)
    return tracked


def test_histories_go_on_where_they_track_the_same_values_and_start_again_elsewhere():
    model = model_of()
    for step in range(SWITCH):
        train(model, step)
    before = state_of_recipe(model).amaxes.clone()
    set_recipe(model, SECOND)
    tracked = state_of_recipe(model)
    for role, name in enumerate(ROLES):
        if name == "dgrad.rhs":  # shares Fprop's operand, and tracks nothing
            continue
        kept = not name.startswith("wgrad")
        expected = (
            before[:, role, : HISTORY + 2] if kept else torch.tensor([-1.0, -1.0, 0.0, 0.0]).expand(2, -1)
        )
        assert_same_bytes(tracked.amaxes[:, role, PENDING:], expected[:, PENDING:].contiguous())
        assert tracked.counters[:, role, COUNT].tolist() == ([2, 2] if kept else [0, 0])
    train(model, SWITCH)
    newest = torch.maximum(before[:, 0, PENDING], before[:, 0, HISTORY])
    assert_same_bytes(state_of_recipe(model).amaxes[:, 0, IN_USE], 2.0 * newest)
    assert (state_of_recipe(model).amaxes[:, 4:, IN_USE] == -1.0).all(), "Wgrad's operands take their own"


@pytest.mark.parametrize("when", ["after set_step", "before the first step", "without set_step"])
def test_a_change_to_the_same_recipe_changes_no_bit(when, monkeypatch):
    monkeypatch.setattr("fourbits.linear.sr_counter._warned", [True])
    models = [model_of(), model_of()]
    for step in range(6):
        if step == (0 if when == "before the first step" else SWITCH):
            set_recipe(models[1], FIRST)
        runs = []
        for model in models:
            if when == "without set_step":
                x = torch.full((16, 32), 1.0 + step).requires_grad_()
                model.zero_grad()
                model(x).backward(torch.ones(16, 32))
                runs.append([grad_of(x), *(grad_of(p).clone() for p in model.parameters())])
            else:
                runs.append(train(model, step))
        assert_equal_steps(runs[1], runs[0])


@pytest.mark.parametrize("saved_at", [SWITCH - 2, SWITCH, SWITCH + 1])
def test_a_run_resumed_on_either_side_of_the_change_gives_equal_bytes(saved_at):
    """Checkpoints are written between steps, and at the switch after the change."""
    model, resumed = model_of(), None
    for step in range(SWITCH + 3):
        if step == SWITCH:
            set_recipe(model, SECOND)
        if step == saved_at:
            state = recipe_state(model)
            resumed = model_of(None)
            resumed.load_state_dict(model.state_dict())
            convert(resumed, FIRST if step < SWITCH else SECOND, seed=7)
            load_recipe_state(resumed, state)
        elif step == SWITCH and resumed is not None:
            set_recipe(resumed, SECOND)
        expected = train(model, step)
        if resumed is not None:
            assert_equal_steps(train(resumed, step), expected)
    assert resumed is not None


def test_layers_join_and_leave_and_all_draw_the_bits_of_their_place():
    """A layer that joins computes as if it had been quantized from the start, at the same step."""
    without = override(FIRST, {"keep_bf16.names": ["0"]})
    model, other = model_of(without), model_of(get_recipe("nvfp4"))
    set_step(model, 5, 64)
    set_recipe(
        model, override(get_recipe("nvfp4"), {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0})
    )
    assert len(counters_of(model)) == 1, "at once, not at the next set_step"
    assert_equal_steps(train(model, 6), train(other, 6))
    summary = set_recipe(model, without)
    assert [row.quantized for row in summary.rows] == [False, True]
    assert not isinstance(model[0], QuantizedLinear)
    set_recipe(model, "bf16")
    assert [type(module) for module in model] == [nn.Linear, nn.ReLU, nn.Linear]


def test_adaptive_layouts_go_on():
    adaptive = {f"{role}.adaptive": "outer" for role in ("fprop.lhs", "dgrad.lhs")}
    first = override(
        get_recipe("nvfp4"), {**adaptive, "keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0}
    )
    model = model_of(first)
    train(model, 0)
    state_of_recipe(model).counters[:, 0, LAYOUT] = 1
    set_recipe(model, override(first, {"wgrad.lhs.rounding": "rne"}))
    tracked = state_of_recipe(model)
    assert tracked.counters[:, 0, LAYOUT].tolist() == [1, 1]
    assert all('"format":"nvfp4-double"' in text for text in tracked.effective)


def test_shards_and_weight_sources_stay_and_a_recipe_that_does_not_support_them_changes_nothing():
    model = model_of()
    layers: Any = model
    shard_features(layers[0], first_out=32, amax_reduction="one shard")
    set_weight_source(layers[2], lambda weight: quantize(weight.detach(), FIRST.fprop.rhs, 1))
    expected = train(model, 1)
    other = model_of()
    set_recipe(model, FIRST)
    model.load_state_dict(other.state_dict())
    assert_equal_steps(train(model, 1), expected)
    tables = [layer.quantization.table for layer in (layers[0], layers[2])]
    for wrong, message in (
        ({"fprop.rhs.block": (48, 48)}, "multiple of 48"),
        ({"fprop.lhs.rht": 16, "fprop.rhs.rht": 16}, "which a transform hides"),
    ):
        with pytest.raises(ValueError, match=message):
            set_recipe(model, override(FIRST, wrong))
        assert [layer.quantization.table for layer in (layers[0], layers[2])] == tables


def test_models_for_which_a_change_makes_no_sense_are_refused():
    for model in (model_of(None), model_of("bf16")):
        with pytest.raises(ValueError, match=r"the model has no converted layer\. Call convert"):
            set_recipe(model, SECOND)
    model = model_of()
    convert(model[0], FIRST, seed=1)
    with pytest.raises(ValueError, match=r"converted with several seeds, \[1, 7\]"):
        set_recipe(model, SECOND)
    model = nn.Sequential(model_of(), model_of())
    set_step(model[0], 3)
    with pytest.raises(ValueError, match="parts of the model are at different steps"):
        set_recipe(model, SECOND)


def test_the_callers_choice_of_layers_outlives_a_change_of_recipe():
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    convert(model, "nvfp4", exclude="0", filter_fn=lambda module, name: name != "2")
    summary = set_recipe(model, "mxfp8")
    assert [row.precision for row in summary.rows] == ["bf16", "mxfp8", "bf16", "mxfp8"]
