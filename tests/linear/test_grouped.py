"""Groups of linears in one parameter: the bits of a loop of linears, in every recipe."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fourbits.linear import sr_counter
from fourbits.linear.convert import convert
from fourbits.linear.grouped import QuantizedGroup
from fourbits.linear.module import QuantizedLinear
from fourbits.linear.step import counters_of, set_step
from fourbits.linear.summary import ConversionSummary
from fourbits.model.experts import GroupedLinear
from fourbits.model.linear import Linear
from fourbits.recipe.presets import get_recipe
from fourbits.settings import override
from support.assertions import assert_same_bytes

COUNTS = [17, 0, 32, 5]
WIDTH, OUT = 48, 32
RECIPES = ["bf16", "nvfp4", "nvfp4-46", "quartet2", "mxfp4", "fp8", "mxfp8"]


class Mixture(nn.Module):
    """A linear, a group, a linear, so that numbers of layers before and after the group matter."""

    def __init__(self):
        super().__init__()
        self.before = Linear(WIDTH, WIDTH)
        self.experts: Any = GroupedLinear(len(COUNTS), WIDTH, OUT, init_std=0.3)
        self.after = Linear(OUT, WIDTH)
        for linear in (self.before, self.after):
            nn.init.normal_(linear.weight, std=0.3)

    def forward(self, x):
        return self.after(self.experts(self.before(x), COUNTS))


class Loop(nn.Module):
    """The same with a list of linears."""

    def __init__(self, source):
        super().__init__()
        self.before = copy.deepcopy(source.before)
        self.experts: Any = nn.ModuleDict({f"e{i}": Linear(WIDTH, OUT) for i in range(len(COUNTS))})
        with torch.no_grad():
            for linear, weight in zip(self.experts.values(), source.experts.weight, strict=True):
                linear.weight.copy_(weight)
        self.after = copy.deepcopy(source.after)
        self.experts_list: list[Any] = list(self.experts.values())

    def forward(self, x):
        parts = zip(self.experts_list, self.before(x).split(COUNTS), strict=True)
        return self.after(torch.cat([linear(part) for linear, part in parts if len(part)]))


def pair(recipe: str) -> tuple[Any, Any, ConversionSummary, ConversionSummary]:
    group = Mixture()
    loop = Loop(group)
    return group, loop, convert(group, recipe, seed=5), convert(loop, recipe, seed=5)


def step(model: Any, x: torch.Tensor, dy: torch.Tensor, number: int | None = None) -> tuple[Any, Any]:
    if number is not None:
        set_step(model, number)
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    return y.detach(), x.grad


def expert_gradients(model: Any) -> list[torch.Tensor]:
    if isinstance(model, Mixture):
        return list(model.experts.weight.grad)
    return [torch.zeros(OUT, WIDTH) if e.weight.grad is None else e.weight.grad for e in model.experts_list]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_has_the_bits_of_a_loop_of_linears(recipe, dtype):
    group, loop, *_ = pair(recipe)
    x, dy = torch.randn(sum(COUNTS), WIDTH).to(dtype), torch.randn(sum(COUNTS), WIDTH).to(dtype)
    for number in (3, 4):
        for found, wanted in zip(step(group, x, dy, number), step(loop, x, dy, number), strict=True):
            assert_same_bytes(found, wanted)
    assert_same_bytes(group.before.weight.grad, loop.before.weight.grad)
    assert_same_bytes(group.after.weight.grad, loop.after.weight.grad)
    gradients = zip(expert_gradients(group), expert_gradients(loop), strict=True)
    for place, (found, wanted) in enumerate(gradients):
        assert_same_bytes(found, wanted)
        assert found.any() == bool(COUNTS[place]), "an expert without rows has a gradient of zero"


def test_a_group_is_what_the_summary_says_and_bf16_gives_it_back():
    group, loop, of_group, of_loop = pair("nvfp4-naive")
    assert type(group.experts) is QuantizedGroup
    row = next(row for row in of_group.rows if row.name == "experts")
    assert (row.shape, row.precision) == ((len(COUNTS) * OUT, WIDTH), "nvfp4")
    assert of_group.share_of_parameters == of_loop.share_of_parameters == 1
    assert list(group.state_dict()) == ["before.weight", "experts.weight", "after.weight"]
    for model in (group, loop):
        assert isinstance(model.after, QuantizedLinear)
        assert model.after.quantization.layer == len(COUNTS) + 1
    x = torch.randn(sum(COUNTS), WIDTH)
    quantized = group(x)
    convert(group, "bf16")
    assert type(group.experts) is GroupedLinear
    assert not torch.equal(group(x), quantized)


def test_without_set_step_noise_is_fresh_and_the_counter_advances_once_per_backward_pass(monkeypatch):
    monkeypatch.setattr(sr_counter, "_warned", [True])
    group, _, *_ = pair("nvfp4")
    x, dy = torch.randn(sum(COUNTS), WIDTH), torch.randn(sum(COUNTS), WIDTH)
    first = step(group, x, dy)
    assert {int(counter[1]) for counter in counters_of(group)} == {1}
    second = step(group, x, dy)
    assert {int(counter[1]) for counter in counters_of(group)} == {2}
    assert_same_bytes(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_evaluation_in_high_precision_is_the_groups_own():
    group, _, *_ = pair("nvfp4-naive")
    x = torch.randn(sum(COUNTS), WIDTH)
    group.experts.quantization.quantize_eval = False
    group.eval()
    plain = GroupedLinear(len(COUNTS), WIDTH, OUT)
    plain.load_state_dict(group.experts.state_dict())
    assert_same_bytes(group.experts(x, COUNTS), plain(x, COUNTS))


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4-naive"])
@pytest.mark.parametrize("counts", [[1, 2], [1, 2, 3, 4]])
def test_counts_that_do_not_fit_are_refused(recipe, counts):
    group, _, *_ = pair(recipe)
    with pytest.raises(ValueError, match="counts must"):
        group.experts(torch.randn(6, WIDTH), counts)
    assert group.experts(torch.randn(0, WIDTH), [0, 0, 0, 0]).shape == (0, OUT)


def test_autocast_reaches_a_group_as_it_reaches_a_loop_of_linears():
    group, loop, *_ = pair("nvfp4-naive")
    x, dy = torch.randn(2, sum(COUNTS), WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert group.experts(x, COUNTS).dtype == torch.bfloat16
        for found, wanted in zip(
            step(group, x, dy.bfloat16(), 3), step(loop, x, dy.bfloat16(), 3), strict=True
        ):
            assert_same_bytes(found, wanted)


def test_rows_of_another_width_are_refused():
    """Padded to blocks of 16 they would fit."""
    group, _, *_ = pair("nvfp4-naive")
    with pytest.raises(ValueError, match=rf"in_features={WIDTH} columns, got shape \[6, {WIDTH - 1}\]"):
        group.experts(torch.randn(6, WIDTH - 1), [1, 2, 3, 0])


def test_stacked_experts_of_an_unknown_class_are_listed_and_stay():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(4, 32, 16))
            self.taps = nn.Parameter(torch.randn(32, 1, 4))

    model = nn.Sequential(nn.Linear(16, 16), Experts(), nn.Conv1d(16, 16, 8))
    summary = convert(model, "nvfp4-naive")
    kept = {row.name: (row.shape, row.reason) for row in summary.rows if not row.quantized}
    why = "stacked weights of Experts, not a known group of linear layers"
    assert kept == {"1.up_proj": ((128, 16), why), "2.weight": ((16, 128), "convolution")}
    assert summary.share_of_linears == 1 / 3


def test_a_group_has_no_amax_policy_and_says_so():
    recipe = override(get_recipe("nvfp4-naive"), {"fprop.lhs.amax_policy": "delayed"})
    reasons = {row.name: row.reason for row in convert(Mixture(), recipe).rows if not row.quantized}
    assert reasons == {"experts": "groups of linear layers do not support amax policies or adaptive layouts"}
