"""Every GEMM of every preset equals the float64 product of its dequantized operands, operand by operand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fourbits.formats.descriptors import BLOCK_FORMATS
from fourbits.linear.convert import convert
from fourbits.linear.step import set_step
from fourbits.quant.operand import OperandSpec
from fourbits.recipe.presets import get_recipe, list_recipes
from fourbits.recipe.recipe import GemmSpec, KeepBF16, Recipe
from support.straight_through import ROLES, RunPosition, dgrad, fprop, grad_of, wgrad

#: recipes whose GEMMs are those of their operands alone, each quantized from one tensor; test_corrections,
#: test_hot_channels and test_error_feedback have the rest
PLAIN_GEMMS = [
    name
    for name in list_recipes()
    if name != "bf16"
    and not get_recipe(name).table.corrects
    and not get_recipe(name).fprop.lhs.error_feedback
]
#: tokens, in_features, out_features: multiples of 16 and none; incomplete blocks of every size
SHAPES = [(48, 80, 64), (35, 40, 23), (1, 16, 1), (160, 130, 144)]
CLOCK = RunPosition(seed=7, layer=1, step=3, first_token=32)
EXACT = OperandSpec(format="fp32")


def everywhere(recipe: Recipe) -> Recipe:
    """The recipe without linears in BF16."""
    return replace(recipe, keep_bf16=KeepBF16(names=()))


def quantizing_only(recipe: Recipe, role: str) -> Recipe:
    """The recipe with one operand left as it is and all others in fp32, under the same transforms."""
    table = recipe.table
    gemms: dict[str, GemmSpec] = {}
    for gemm in ("fprop", "dgrad", "wgrad"):
        sides = {side: getattr(getattr(table, gemm), side) for side in ("lhs", "rhs")}
        gemms[gemm] = GemmSpec(
            **{
                side: spec
                if f"{gemm}.{side}" == role
                else replace(EXACT, rht=spec.rht, rht_signs=spec.rht_signs)
                for side, spec in sides.items()
            }
        )
    return replace(recipe, keep_bf16=KeepBF16(names=()), **gemms)


def assert_follows_its_table(recipe: Recipe, shape: tuple[int, int, int], dtype=torch.float32) -> None:
    tokens, k, n = shape
    linear = nn.Linear(k, n, dtype=dtype)
    model = nn.Sequential(nn.Linear(8, 8), linear)
    convert(model, recipe, seed=CLOCK.seed)
    set_step(model, CLOCK.step, CLOCK.first_token)
    x = torch.randn(tokens, k, dtype=dtype, requires_grad=True)
    dy = torch.randn(tokens, n, dtype=dtype)
    y = linear(x)
    y.backward(dy)
    w, b, table = linear.weight.detach(), linear.bias.detach(), recipe.table
    fprop(x.detach(), w, b, table, CLOCK).assert_near(y.detach())
    dgrad(dy, w, table, CLOCK).assert_near(grad_of(x))
    wgrad(dy, x.detach(), table, CLOCK).assert_near(grad_of(linear.weight))
    torch.testing.assert_close(grad_of(linear.bias), dy.double().sum(0).to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PLAIN_GEMMS)
def test_each_gemm_of_a_preset_multiplies_its_own_two_operands(name, shape):
    assert_follows_its_table(everywhere(get_recipe(name)), shape)


@pytest.mark.parametrize("rht", [0, 16])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_any_format_serves_every_operand(name, rht):
    """bf16 and fp32 beside one quantized GEMM: a linear without any stays an nn.Linear."""
    spec = OperandSpec(format=name, rht=rht)
    gemm, quantized = GemmSpec(lhs=spec, rhs=spec), GemmSpec(lhs=OperandSpec(), rhs=OperandSpec())
    dgrad = gemm if spec.block_format.quantized else quantized
    recipe = Recipe(name=name, fprop=gemm, dgrad=dgrad, wgrad=gemm)
    assert_follows_its_table(everywhere(recipe), (48, 80, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PLAIN_GEMMS)
def test_parameters_of_16_bits_are_used_as_they_are(name, dtype):
    assert_follows_its_table(everywhere(get_recipe(name)), (48, 80, 64), dtype)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", PLAIN_GEMMS)
def test_an_operand_is_quantized_by_its_own_spec_and_no_other(name, role):
    recipe = get_recipe(name)
    spec = getattr(getattr(recipe, role[:5]), role[6:])
    only = quantizing_only(recipe, role)
    if spec.block_format.quantized:
        assert_follows_its_table(only, (48, 80, 64))


def test_a_bf16_weight_beside_quantized_activations_is_a_recipe_too():
    row = OperandSpec()
    recipe = Recipe(name="activations", fprop=GemmSpec(lhs=row), dgrad=GemmSpec(lhs=row))
    assert_follows_its_table(everywhere(recipe), (48, 80, 64), torch.bfloat16)


def test_the_straight_through_gradient_ignores_that_operands_were_rounded():
    """Against autograd in float64 through the unquantized linear: equal but for the rounding of operands."""
    linear = nn.Linear(64, 64, bias=False)
    x = torch.randn(64, 64, requires_grad=True)
    exact_x = x.detach().double().requires_grad_()
    exact_w = linear.weight.detach().double().requires_grad_()
    (exact_x @ exact_w.t()).square().sum().backward()
    convert(linear, replace(everywhere(get_recipe("fp8")), name="fp8 everywhere"))
    set_step(linear, 0)
    linear(x).square().sum().backward()
    for leaf, exact_leaf in ((x, exact_x), (linear.weight, exact_w)):
        exact = grad_of(exact_leaf)
        error = (grad_of(leaf).double() - exact).norm() / exact.norm()
        # E4M3 rounds relatively by at most 2^-4; three operands are rounded on the way to each gradient
        assert error < 3 * 2**-4
