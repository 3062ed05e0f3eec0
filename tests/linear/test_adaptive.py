"""Adaptive layouts: statistics as the oracle takes them, choices held for an interval and saved."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourbits.linear.adaptive_layout import measured_at, resolved
from fourbits.linear.checkpoint_state import load_recipe_state, recipe_state
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.quant.amax_stats import layout_counts
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.presets import get_recipe
from fourbits.recipe.recipe import GemmSpec, GemmTable, Recipe
from fourbits.settings import override
from oracle import policies
from oracle.bridge import patterns
from support.assertions import assert_same_bytes
from support.straight_through import RunPosition, dgrad, fprop, grad_of, wgrad

SHAPES = [(32, 64), (17, 35), (1, 16), (0, 32), (48, 0)]


def spread(rows: int, columns: int) -> Tensor:
    """Rows and blocks whose magnitudes lie many octaves apart."""
    octaves = -torch.randint(0, 14, (rows, -(-columns // 16))).float()
    return torch.randn(rows, columns) * octaves.exp2().repeat_interleave(16, 1)[:, :columns]


def stored(x: Tensor, axis: int) -> Tensor:
    """The stored matrix: rows, then the contraction, padded to 16."""
    x = x.t() if axis == 0 else x
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 16)).contiguous()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["outer", "block"])
def test_statistics_are_those_of_the_oracle(kind, shape, axis):
    count = {"outer": policies.outer_counts, "block": policies.block_counts}[kind]
    spec = OperandSpec(block=(16, 16) if kind == "block" else (1, 16), adaptive=kind)
    for x in (spread(*shape), torch.randn(shape), torch.zeros(shape)):
        expected = count(patterns(stored(x, axis)))
        assert layout_counts(x, spec, axis, kind, None).tolist() == [expected.n, expected.m]


def test_statistics_see_the_tensor_that_is_quantized():
    """After the transform rows are alike, so that a tensor for outer blocks is one no longer."""
    x = torch.zeros(64, 32)
    x[::16] = 1000.0
    x[1:, :] += 0.001
    plain, rotated = (OperandSpec(adaptive="outer", rht=rht) for rht in (0, 16))
    assert layout_counts(x, plain, 0, "outer", None)[1] == 0
    assert layout_counts(x, plain, 1, "outer", None)[1] > 0
    assert layout_counts(x, rotated, 0, "outer", None).tolist() == [4 * 32, 0]


def table(x: str = "none", weight: str = "none", interval: int = 2) -> GemmTable:
    """nvfp4 with an adaptive X of Fprop, and W in both its GEMMs."""
    changes: dict[str, Any] = {"fprop.lhs.adaptive": x}
    for role in ("fprop.rhs", "dgrad.rhs"):
        changes[f"{role}.adaptive"] = weight
    changes |= {f"{role}.adaptive_interval": interval for role in ("fprop.lhs", "fprop.rhs", "dgrad.rhs")}
    return override(get_recipe("nvfp4").table, changes)


def test_a_choice_replaces_the_layout_and_nothing_else():
    adaptive = table("outer", "block")
    own, other = resolved(adaptive, [0] * 6), resolved(adaptive, [1] * 6)
    assert own == table(interval=2)
    assert own.shares_weight
    assert other.fprop.lhs == OperandSpec(format="nvfp4-double", adaptive_interval=2)
    assert other.fprop.rhs.block == (1, 16)
    assert other.dgrad.rhs == other.fprop.rhs
    assert not other.shares_weight
    assert other.wgrad == own.wgrad
    assert resolved(adaptive, [0, 1, 0, 0, 0, 0]).dgrad.rhs.block == (1, 16)  # W follows Fprop's choice


def test_statistics_are_taken_at_multiples_of_the_interval_and_once_for_a_shared_weight():
    adaptive = table("outer", "block", interval=3)
    assert [bool(measured_at(adaptive, step)) for step in range(7)] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert measured_at(adaptive, 3) == "fprop.lhs:outer,fprop.rhs:block"
    assert measured_at(get_recipe("nvfp4").table, 0) == ""


def model_of(adaptive: GemmTable) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    convert(model, Recipe(name="adaptive", fprop=adaptive.fprop, dgrad=adaptive.dgrad, wgrad=adaptive.wgrad))
    return model


def run(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(dy)
    return [y.detach(), grad_of(leaf), *(grad_of(p).clone() for p in model.parameters())]


def quiet(rows: int = 32) -> Tensor:
    """Half of the rows so small against the rest that their block scales are subnormal."""
    x = torch.randn(rows, 32)
    x[::2] *= 1e-6
    return x


def assert_follows(
    outputs: list[Tensor], model: nn.Module, x: Tensor, dy: Tensor, layout: GemmTable, step: int
):
    (weight,) = (p.detach() for p in model.parameters())
    position = RunPosition(step=step)
    for product, output in zip(
        (
            fprop(x, weight, None, layout, position),
            dgrad(dy, weight, layout, position),
            wgrad(dy, x, layout, position),
        ),
        outputs,
        strict=True,
    ):
        product.assert_near(output)


def test_a_choice_is_made_at_a_measuring_step_and_held_until_the_next():
    adaptive = table("outer", interval=2)
    model, dy = model_of(adaptive), torch.randn(32, 32)
    loud = torch.randn(32, 32)
    inputs = [quiet(), loud, loud, quiet(), quiet(), loud]
    chosen = [0, 1, 1, 0, 0, 1]  # by the inputs of steps 0, 2 and 4, from the step after
    for step, (x, other) in enumerate(zip(inputs, chosen, strict=True)):
        set_step(model, step)
        assert recipe_state(model)["0.layout"].tolist() == [other, 0, 0, 0, 0, 0]
        assert_follows(run(model, x, dy), model, x, dy, resolved(adaptive, [other, 0, 0, 0, 0, 0]), step)


def test_a_weight_that_leaves_its_square_blocks_is_quantized_again_in_dgrad():
    adaptive = table(weight="block")
    model, x, dy = model_of(adaptive), torch.randn(32, 32), torch.randn(32, 32)
    with torch.no_grad():
        next(model.parameters())[::2] *= 1e-2
    set_step(model, 0)
    run(model, x, dy)
    set_step(model, 1)
    assert recipe_state(model)["0.layout"].tolist() == [0, 1, 0, 0, 0, 0]
    assert_follows(run(model, x, dy), model, x, dy, resolved(adaptive, [0, 1, 0, 0, 0, 0]), 1)


def test_counts_add_up_over_micro_batches_and_are_not_taken_in_evaluation():
    model, dy = model_of(table("outer")), torch.randn(32, 32)
    set_step(model, 0)
    run(model, quiet(), dy)
    once = recipe_state(model)["0.layout_counts"]
    run(model, quiet(), dy)
    twice = recipe_state(model)["0.layout_counts"]
    assert twice[0, 0] == 2 * once[0, 0] == 2 * 64
    with torch.no_grad():
        model(quiet())
    model.eval()
    run(model, quiet(), dy)
    assert torch.equal(recipe_state(model)["0.layout_counts"], twice)


def test_a_resumed_run_makes_the_choices_of_one_that_was_not_stopped():
    steps = [(quiet() if step % 4 == 0 else torch.randn(32, 32), torch.randn(32, 32)) for step in range(6)]
    whole, saved, outputs = model_of(table("outer", "block")), {}, []
    for step, (x, dy) in enumerate(steps):
        set_step(whole, step)
        outputs.append(run(whole, x, dy))
        if step in (0, 3):
            saved[step] = recipe_state(whole)
    for last, state in saved.items():
        resumed = model_of(table("outer", "block"))
        load_recipe_state(resumed, state)
        for step in range(last + 1, 6):
            set_step(resumed, step)
            for got, want in zip(run(resumed, *steps[step]), outputs[step], strict=True):
                assert_same_bytes(got, want)


def test_without_set_step_an_adaptive_layer_says_what_it_needs():
    model = model_of(table("outer"))
    with pytest.raises(ValueError, match=r"adaptive layouts .* Call fourbits\.set_step"):
        model(torch.randn(16, 32))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_layer_follows_its_choices():
    torch.compiler.reset()
    eager, other, dy = model_of(table("outer")), model_of(table("outer")), torch.randn(32, 32)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for step, x in enumerate([quiet(), torch.randn(32, 32), torch.randn(32, 32)]):
        set_step(eager, step)
        set_step(other, step)
        other.zero_grad()
        leaf = x.clone().requires_grad_()
        y = compiled(leaf)
        y.backward(dy)
        for got, want in zip([y, grad_of(leaf)], run(eager, x, dy), strict=False):
            assert_same_bytes(got.detach(), want)


def test_a_format_without_the_option_is_refused_when_the_spec_is_built():
    with pytest.raises(ValueError, match=r"adaptive: outer needs nvfp4 \(1, 16\), got mxfp4"):
        GemmSpec(lhs=OperandSpec(format="mxfp4", adaptive="outer"))
