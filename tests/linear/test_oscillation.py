"""OsciReset: weights that flip between two codes are found and set to the centre of their bin."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourbits.linear.convert import convert
from fourbits.linear.oscillation import OscillationReset
from fourbits.linear.step import set_step
from fourbits.model.experts import GroupedLinear
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from fourbits.recipe.oscillation import Oscillation
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import KeepBF16, Recipe
from fourbits.recipe.schedule import RunShape
from fourbits.settings import override
from support.assertions import assert_same_bytes

EVERYWHERE = {"keep_bf16.first_blocks": 0, "keep_bf16.last_blocks": 0}
PLAN = Oscillation(window=4, period=6, ratio=4.0, start=2)


def model_of(recipe: str = "nvfp4", **changes: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48))
    convert(model, override(get_recipe(recipe), {**EVERYWHERE, **changes}))
    return model


def weight_of(model: nn.Module) -> Tensor:
    return next(p for p in model.parameters() if p.dim() >= 2).detach()


def walk(model: nn.Module, moves: Tensor, plan: Oscillation = PLAN) -> list[Tensor]:
    """The weights after each step: moves [steps, *weight] are what an optimizer adds."""
    reset, weight, found = OscillationReset(model, plan), weight_of(model), []
    reset.step(0)
    for step, move in enumerate(moves):
        weight += move
        reset.step(step + 1)
        found.append(weight.clone())
    return found


def near_an_edge(model: nn.Module) -> Tensor:
    """Fill the weight so that its blocks have scale 1: 6 in each, and 2.5 (an edge), 0.7, 3 in turn."""
    weight = weight_of(model)
    weight.copy_(torch.tensor([6.0, 2.5, 0.7, 3.0]).repeat(48, 8))
    return weight


def test_an_oscillating_weight_is_reset_and_a_steady_or_resting_one_is_not():
    """Column 1 moves by 1/32 over the edge from 2 to 3 and back; column 2 by 1/8 away, 3 and 0 rest."""
    model = model_of()
    before = near_an_edge(model).clone()
    moves = torch.zeros(8, 48, 32)
    moves[:, :, 1::4] = torch.tensor([1.0, -1.0] * 4)[:, None, None] / 32
    moves[:, :, 2::4] = 0.125
    found = walk(model, moves)
    for step in range(5):  # windows are of the steps 3 to 6
        assert_same_bytes(found[step], before + moves[: step + 1].sum(0))
    after = found[5]
    assert set(after[:, 1::4].flatten().tolist()) <= {2.0, 3.0}, "the centre of a bin"
    expected = before + moves[:6].sum(0)
    for column in (0, 2, 3):
        assert_same_bytes(after[:, column::4], expected[:, column::4])


def test_the_reset_is_that_of_an_implementation_in_plain_python():
    """Random walks of all weights, over two windows, element by element."""
    model, generator = model_of("nvfp4-naive"), torch.Generator().manual_seed(3)
    moves = 0.02 * torch.randn(14, 48, 32, generator=generator)
    moves[1::2] = -moves[::2] * 0.9
    start = weight_of(model).clone()
    found = walk(model, moves)
    spec = OperandSpec(source="bf16")

    def value(w: Tensor) -> Tensor:
        return quantize(w, spec, axis=1).dequantize(torch.float32)

    weight, trail, resets = start, [], 0
    for done in range(1, 15):
        weight = weight + moves[done - 1]
        if done in (2, 8, 14):
            trail = []
        trail.append(weight)
        if done in (6, 12):
            values = [value(w) for w in trail]
            for i in range(48):
                for j in range(32):
                    far = value_far = torch.zeros(())
                    for a, b in zip(range(4), range(1, 5), strict=True):
                        far = far + (trail[b][i, j] - trail[a][i, j]).abs()
                        value_far = value_far + (values[b][i, j] - values[a][i, j]).abs()
                    if value_far >= 4 * far and far > 0:
                        weight = weight.clone()
                        weight[i, j] = values[-1][i, j]
                        resets += 1
        assert_same_bytes(found[done - 1], weight, str(done))
    assert 10 < resets < 2 * 48 * 32 / 2


def test_a_window_as_long_as_its_period_ends_where_the_next_begins():
    model = model_of()
    near_an_edge(model)
    moves = torch.zeros(13, 48, 32)
    moves[:, :, 1::4] = torch.tensor([1.0, -1.0] * 7)[:13, None, None] / 32
    found = walk(model, moves, Oscillation(window=3, period=3, ratio=4.0))
    changed = [i + 1 for i in range(1, 13) if not torch.equal(found[i], found[i - 1] + moves[i])]
    assert changed == [3], "once in the centre of a bin, the same moves no longer change its code"
    moved = [
        torch.equal(quantize(w, OperandSpec()).codes, quantize(found[2], OperandSpec()).codes) for w in found
    ]
    assert all(moved[2:])
    assert not all(moved[:2])


@pytest.mark.parametrize("stop", range(1, 13))
def test_a_run_that_stops_anywhere_continues_with_the_same_bits(stop):
    generator = torch.Generator().manual_seed(5)
    moves = 0.02 * torch.randn(13, 48, 32, generator=generator)
    moves[1::2] = -moves[::2][:6] * 0.9
    whole = walk(model_of(), moves)
    model = model_of()
    first = OscillationReset(model, PLAN)
    for step in range(stop):
        weight_of(model).add_(moves[step])
        first.step(step + 1)
    state = {key: x.clone() for key, x in first.state_dict().items()}
    second = OscillationReset(model, PLAN)
    expected = second.empty_state(stop)
    assert {key: x.shape for key, x in state.items()} == {key: x.shape for key, x in expected.items()}
    second.load_state_dict(state)
    for step in range(stop, 13):
        weight_of(model).add_(moves[step])
        second.step(step + 1)
        assert_same_bytes(weight_of(model), whole[step])


def test_experts_are_quantized_one_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(GroupedLinear(3, 32, 48))
    convert(model, override(get_recipe("nvfp4"), EVERYWHERE), stacks=[])
    weight = weight_of(model)
    weight *= torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    one = model_of()
    moves = torch.zeros(6, 3, 48, 32)
    generator = torch.Generator().manual_seed(1)
    moves[:] = (
        0.02 * torch.randn(48, 32, generator=generator) * torch.tensor([1.0, -1.0] * 3)[:, None, None, None]
    )
    moves *= torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    start = weight.clone()
    found = walk(model, moves)[-1]
    for expert in range(3):
        weight_of(one).copy_(start[expert])
        assert_same_bytes(found[expert], walk(one, moves[:, expert])[-1])
    assert not torch.equal(found, start + moves.sum(0))


def test_a_stored_amax_is_that_of_the_forward_pass():
    """Under a delayed amax, values are those that Fprop multiplied by."""
    model = model_of("nvfp4-naive", **{"fprop.rhs.amax_policy": "delayed"})
    x = torch.randn(16, 32, requires_grad=True)
    set_step(model, 0)
    model(x).sum().backward()
    weight = weight_of(model)
    amax = weight.to(torch.bfloat16).abs().amax().float()
    set_step(model, 1)
    weight *= 2
    reset = OscillationReset(model, Oscillation(window=2, period=2))
    reset.step(2)
    value = reset.state_dict()["0.weight.value"]
    assert_same_bytes(
        value, quantize(weight, OperandSpec(source="bf16"), amax=amax).dequantize(torch.float32)
    )
    assert value.abs().max() < weight.abs().max() * 0.6


def test_a_phase_in_bf16_resets_nothing():
    phase = [{"name": "late", "start": 3, "gemms": "forward"}]
    model = model_of(schedule=phase)
    near_an_edge(model)
    reset, weight = OscillationReset(model, PLAN), weight_of(model)
    for done in range(1, 8):
        set_step(model, done - 1)
        weight[:, 1::4] += (1 if done % 2 else -1) / 32
        reset.step(done)
    assert set(weight[:, 1::4].flatten().tolist()) == {2.5 + 1 / 32}


@pytest.mark.parametrize(
    ("start", "first"), [(7, 7), (0.6, 60), ("2000/16128", 12), ("decay-start", 80), ("warmup-end", 5)]
)
def test_a_start_is_a_point_of_the_run(start, first):
    recipe = Recipe(name="r", oscillation=Oscillation(start=start))
    found = recipe.for_run(100, warmup=5, decay=20).oscillation
    assert found is not None
    assert found.first == first
    assert found.for_run(RunShape(100)) == found


def test_a_recipe_without_it_keeps_its_digest_and_one_with_it_has_another():
    recipe = get_recipe("nvfp4")
    assert override(recipe, {"oscillation.ratio": 4}).digest != recipe.digest
    assert override(recipe, {"oscillation.ratio": 4}).oscillation == Oscillation(ratio=4.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Oscillation(window=0), "window must be at least 1"),
        (lambda: Oscillation(window=60, period=50), "at most the period, got 60 of 50"),
        (lambda: Oscillation(ratio=0.5), "ratio must be at least 1, got 0.5"),
        (lambda: Oscillation(start="later"), "oscillation: start must be a step"),
        (
            lambda: Oscillation(start=100).for_run(RunShape(100)),
            "must lie before the end of the run, got 100",
        ),
        (lambda: Oscillation(start="decay-start").for_run(RunShape(9)), "needs a decay"),
        (lambda: OscillationReset(model_of(), Oscillation(start=0.5)), "depends on the length of the run"),
        (lambda: OscillationReset(nn.Linear(16, 16), PLAN), "must have been converted"),
        (lambda: OscillationReset(model_of("bf16"), PLAN), "the model has none"),
        (
            lambda: OscillationReset(model_of(), PLAN).load_state_dict({"1.weight.value": torch.zeros(1)}),
            "got other names, first '0.weight",
        ),
    ],
)
def test_a_wrong_use_is_an_error(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def test_the_layers_that_stay_in_bf16_are_not_followed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert(model, Recipe(name="one", **_gemms(), keep_bf16=KeepBF16(names=("0",))))
    reset = OscillationReset(model, Oscillation())
    reset.step(0)
    assert {key.partition(".")[0] for key in reset.state_dict()} == {"1"}


def _gemms() -> dict[str, Any]:
    table = get_recipe("nvfp4-naive")
    return {"fprop": table.fprop, "dgrad": table.dgrad, "wgrad": table.wgrad}
